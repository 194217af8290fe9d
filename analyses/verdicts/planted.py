"""Counts false verdicts on planted tables, whose truth over the population of prompts is known.

    python -m analyses.verdicts.planted [--tables 200] [--prompts 64] [--out FILE.csv]

Each kind of headline is tried on --tables tables, each drawn from its own world (`worlds`), with --prompts prompts that
have an advantage on average. The truth is computed from 3,000 prompts of the world or in closed form. A verdict is
false if the opposite or equality is true. A ranking is clear if the largest true share is at least twice the next.
Prints and writes, per kind: tables, verdicts, false ones, the upper end of their rate (Clopper and Pearson, 95 %),
clear tables, and how many of those were decided.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import tyro
from scipy.stats import beta
from tqdm import tqdm

from analyses.common.script import exit_with
from analyses.verdicts.worlds import GradientWorld, MovementWorld, TokenWorld
from gradscope.diagnosis import (
    CERTAIN,
    PARTS,
    Diagnosis,
    DiagnosisSettings,
    PromptSums,
    Rows,
    Scope,
    Verdict,
    gradient_rows,
    join_rows,
    one_row,
    say,
    sum_by_prompt,
    token_shares,
    trend_changes,
)
from gradscope.gradients import PARAMETERS, Gram
from gradscope.intervals import interval_labels
from gradscope.resampling import Supply
from gradscope.theory import regress_norms

LABELS = tuple(interval_labels())
POPULATION = 3_000
"""Prompts that tell a world's truth."""
EQUAL = 0.01
"""Shares that 3,000 prompts do not tell apart are taken as equal, so that any verdict on them is false."""


@dataclass(frozen=True)
class Judged:
    """One question about one table."""

    kind: str
    given: bool
    """Whether a verdict was given."""
    false: bool
    clear: bool = False
    """Whether a verdict is to be expected."""


def diagnose_tokens(table: pd.DataFrame, rng: np.random.Generator | None) -> Diagnosis:
    """A diagnosis of the parts that a token table alone gives; rng None: without intervals, as of a population."""
    draws = {"seed": rng, "resamples": DiagnosisSettings.resamples}
    shares = token_shares(sum_by_prompt(table, len(LABELS)), LABELS, **draws)
    kinds, drivers = PARTS["where"].shares_by(table, **draws), regress_norms(table, **draws)
    informative = int(table.loc[table["advantage"] != 0, "group"].nunique())
    rows = join_rows([shares, one_row("prompts", float(informative), len(table), unit="prompts")])
    return make_diagnosis(rows, table, informative, where=kinds, drivers=drivers)


SAYING = ("dominance", "summed", "signal", "influence", "directions", "where", "drivers")
"""Parts whose verdicts are counted."""


def make_diagnosis(rows: pd.DataFrame, table: pd.DataFrame, informative: int, **frames: pd.DataFrame) -> Diagnosis:
    prompts = int(table["group"].nunique())
    table = table.assign(**{name: 1.0 for name in ("weight", PARAMETERS) if name not in table})  # not asked about
    known = {name: Rows() for name in SAYING if name != "drivers" or name in frames} | {"dominance": Rows(rows, frames)}
    return say(Diagnosis(known, Scope(LABELS, Supply(informative, prompts, prompts), table), parts=PARTS))


def opposes(verdict: Verdict, truth: float) -> bool:
    """Whether a verdict of more or less is false, where what it is about exceeds its measure by `truth`."""
    return (verdict is Verdict.LESS and truth >= 0) or (verdict in (Verdict.MORE, Verdict.DOMINATES) and truth <= 0)


def judge_tokens(found: Diagnosis, truth: Diagnosis) -> Iterator[Judged]:
    """Dominance, the ranking, what (1−π)² predicts, where the energy is, and what the norms follow."""
    said = {finding.kind: finding.verdict for finding in found.findings}
    true = truth.statistics.set_index(["statistic", "interval"])["value"]
    energy = true["squared_share"].to_numpy()
    first, second = np.sort(energy)[:-3:-1]
    odds = np.array([found.pick("largest_share", "raw", label)["value"] for label in LABELS])
    given = bool(odds.max() >= CERTAIN)
    yield Judged("ranking", given, given and odds.argmax() != energy.argmax(), first >= 2 * second)
    low = LABELS[0]
    for kind, statistic in (("dominance_raw", "dominance_index"), ("added", "added_index")):
        verdict, value = said.get(kind, Verdict.UNDECIDED), true[statistic, low]
        wrong = opposes(verdict, value) or (verdict is Verdict.DOMINATES and energy.argmax() != 0)
        yield Judged(kind, verdict in (Verdict.MORE, Verdict.LESS, Verdict.DOMINATES), wrong, abs(value) >= 1)
    kinds, wanted = found.frames["where"], truth.frames["where"].set_index(["driver", "value"])
    for driver in ("token_class", "position_class"):
        own = kinds[(kinds["driver"] == driver) & kinds["squared_share"].notna()]
        over = own[own["squared_lower"] > own["token_upper"]]
        # Classes of position have other edges in every batch: by their order.
        true_rows = wanted.loc[driver]
        excess = (true_rows["squared_share"] - true_rows["token_share"]).to_numpy()
        excess = np.where(np.abs(excess) < EQUAL, 0.0, excess)
        names = dict(zip(true_rows.index if driver == "token_class" else own["value"], excess, strict=False))
        yield Judged(f"where_{driver}", len(over) > 0, any(names.get(name, 1.0) <= 0 for name in over["value"]))
    value = _difference(truth.frames["drivers"])
    verdict = said.get("driver", Verdict.UNDECIDED)
    yield Judged("driver", verdict in (Verdict.MORE, Verdict.LESS), opposes(verdict, value), abs(value) >= 0.3)


def _difference(drivers: pd.DataFrame) -> float:
    rows = drivers[(drivers["quantity"] == "param_grad_norm") & (drivers["driver"] == "difference")]
    return float(rows["coefficient"].iloc[0])


def judge_gradients(world: GradientWorld, prompts: int, rng: np.random.Generator) -> Iterator[Judged]:
    """Shares of the summed gradient, and signal."""
    pairs, tokens = world.sample(prompts, rng)
    token_rows = token_shares_of(tokens, rng)
    rows = join_rows([gradient_rows(Gram.exact(pairs), tokens, LABELS, metric="raw", seed=rng), token_rows])
    table = pd.DataFrame({"group": np.arange(prompts), "weight": 1.0})
    found = make_diagnosis(rows, table, prompts)
    said = {finding.kind: finding.verdict for finding in found.findings}
    excess = world.shares(prompts)[0] - world.tokens[0] / world.tokens.sum()
    verdict = said.get("summed_raw", Verdict.UNDECIDED)
    yield Judged("summed", verdict in (Verdict.MORE, Verdict.LESS), opposes(verdict, excess), abs(excess) >= 0.3)
    for label, has in zip((*LABELS, "all"), world.has_signal(), strict=True):
        given = bool(found.pick("signal_fraction", "raw", label)["lower"] > 0)
        yield Judged("signal", given, given and not has)


def token_shares_of(tokens: np.ndarray, rng: np.random.Generator) -> pd.DataFrame:
    """Return the rows, by prompt and interval, of a batch of which only the tokens are known."""
    rows = token_shares(PromptSums(tokens, tokens, tokens, tokens), LABELS, seed=rng)
    return rows[rows["statistic"].isin(["token_share", "dominance_index", "squared_share", "largest_share"])]


def judge_movement(world: MovementWorld, prompts: int, rng: np.random.Generator) -> Iterator[Judged]:
    """Judge the influence of the lowest interval on the highest, and the directions."""
    table = world.sample(prompts, rng)
    rows, moves = PARTS["influence"].influence_rows(table, LABELS, seed=rng)
    moved, _ = PARTS["directions"].direction_rows(table, "actual", LABELS, seed=rng)
    shares = token_shares_of(np.ones((prompts, 4)), rng)
    found = make_diagnosis(join_rows([rows, moved, shares]), table, prompts, influence=moves)
    said = {finding.kind: finding.verdict for finding in found.findings}
    given = said.get("influence") is Verdict.MORE
    excess = world.sizes[0] ** 2 - world.sizes[3] ** 2
    yield Judged("influence", given, given and excess <= 0, excess >= 0.3)
    population = world.sample(POPULATION, rng)
    for sign, name in ((1, "positive"), (-1, "negative")):
        own = population[np.sign(population["advantage"]) == sign]
        truth = float((np.sign(own["delta_log_odds.all"]) == sign).mean()) - 0.5
        verdict = said.get(f"direction_{name}", Verdict.UNDECIDED)
        # So near one half, 3,000 prompts do not tell its side: equality was planted.
        truth = 0.0 if abs(truth) < 0.01 and world.right[int(sign < 0)] == 0.5 else truth
        yield Judged("direction", verdict in (Verdict.MORE, Verdict.LESS), opposes(verdict, truth), abs(truth) >= 0.1)


def judge_trend(one: TokenWorld, other: TokenWorld, prompts: int, rng: np.random.Generator) -> Iterator[Judged]:
    """Three checkpoints, the last two of one world: a change there is always false."""
    tables = [world.sample(prompts, rng) for world in (one, other, other)]
    truths = [diagnose_tokens(world.sample(POPULATION, rng), None) for world in (one, other)]
    frames = [diagnose_tokens(table, rng).statistics.assign(step=step) for step, table in enumerate(tables)]
    for ends, largest in trend_changes(pd.concat(frames, ignore_index=True), LABELS[0]):
        values = [d.pick(ends.statistic, ends.metric, LABELS[0])["value"] for d in truths]
        values.append(values[1])
        for change in (ends, largest):
            moved = values[change.last.name] - values[change.first.name]
            given = change.verdict in (Verdict.MORE, Verdict.LESS)
            yield Judged("trend", given, given and opposes(change.verdict, moved))


def judge_world(seed: int, prompts: int) -> list[Judged]:
    """All questions about one table of each kind."""
    rng = np.random.default_rng([20, seed])
    world = TokenWorld.draw(rng)
    truth = diagnose_tokens(world.sample(POPULATION, rng), None)
    found = diagnose_tokens(world.sample(round(prompts / (1 - world.idle)), rng), rng)  # so many with an advantage
    return [
        *judge_tokens(found, truth),
        *judge_gradients(GradientWorld.draw(rng), prompts, rng),
        *judge_movement(MovementWorld.draw(rng), prompts, rng),
        *judge_trend(world, TokenWorld.draw(rng), prompts, rng),
    ]


def tabulate(judged: list[Judged]) -> pd.DataFrame:
    """A row per kind: tables, given, false, rate and its upper end, clear, decided."""
    rows = []
    for kind in dict.fromkeys(one.kind for one in judged):
        own = [one for one in judged if one.kind == kind]
        given, false = sum(one.given for one in own), sum(one.false for one in own)
        clear = [one for one in own if one.clear]
        row = {"kind": kind, "tables": len(own), "given": given, "false": false, "rate": false / len(own)}
        row["rate_upper"] = 1.0 if false == len(own) else float(beta.ppf(0.95, false + 1, len(own) - false))
        row |= {"clear": len(clear), "decided": sum(one.given for one in clear)}
        rows.append(row | {"decided_share": row["decided"] / len(clear) if clear else np.nan})
    return pd.DataFrame(rows)


def main(tables: int = 200, prompts: tuple[int, ...] = (64,), out: Path | None = None) -> None:
    """tables: of each kind; prompts: of each table; out: the CSV."""
    parts = []
    for count in prompts:
        judged = [one for seed in tqdm(range(tables), f"{count} prompts") for one in judge_world(seed, count)]
        parts.append(tabulate(judged).assign(prompts=count))
        print(parts[-1].to_string(index=False, float_format="{:.3f}".format), flush=True)
    if out is not None:
        pd.concat(parts, ignore_index=True).to_csv(out, index=False)


if __name__ == "__main__":
    exit_with(lambda: tyro.cli(main))
