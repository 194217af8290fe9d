"""Counts how often a batch's 95 % intervals hold the truth, where few prompts or few tokens are measured.

    python -m analyses.verdicts.coverage [--tables FOLDER] [--draws 2000] [--out FILE.csv]

A cell combines a world, a truth, a sampling design, and numbers of prompts and of measured tokens per probability
interval. Worlds: three that are planted (even energies; heavy-tailed ones; one token of each prompt holds most of its
energy), and every NAME.parquet in FOLDER, a table of `gradscope measure` in which all tokens are measured. The truth is
that of the batch (only its tokens are sampled); of the world (the batch's prompts are drawn from it, too, with
replacement); or, with --whole, of a batch of four times as many prompts (or all, if fewer), from which the prompts are
drawn. For each statistic (share of Σ‖w·g‖², its log₂ over the share of the tokens and over that of (1−π)², mean ‖g‖) it
gives the fraction of the draws that have a confidence interval, and the fraction of these that hold the truth: over all
probability intervals, and for the worst of those that have one in a tenth of the draws. `before`: the percentile
bootstrap over prompts, for at least two prompts. Probability intervals that a batch lacks are left out.

verdicts_coverage.csv is of 1,000 draws a cell, without `before`, and of two tables of 60 prompts: the embedded
policy's, and a de-quantised SmolLM2-135M-Instruct's of short answers. Of 909 rows with intervals (a cell has one per
statistic), 22 are below .93: 18 have an interval in fewer than 3 % of the draws; four (.87 to .93) are from the planted
world in which one token of each prompt dominates. verdicts_coverage_whole.csv
(--whole) is of 1,000 draws a cell of the planted worlds: of 108 rows none is below .96.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pool
from pathlib import Path

import numpy as np
import pandas as pd
import tyro
from tqdm import tqdm

from analyses.common.script import exit_with
from gradscope.gradients import ThresholdSample, TokenSample, token_sizes
from gradscope.resampling import (
    SHARE,
    SIZE,
    Evaluate,
    bound,
    bound_bits,
    effective_sample_size,
    effective_size_of_shares,
    effective_tokens,
    percentiles,
    short_of,
)

INTERVALS = 4
PLANTED = ("even", "heavy-tailed", "one-dominates")
STATISTICS = {"squared_share": 1, "dominance_index": [1, 0], "added_index": [1, 2], "mean_norm": 3}
"""Statistic → its place among what `statistics_of` evaluates, or the two shares that it compares."""
BATCHES = 8
"""Draws of tokens from each batch, where its own truth is asked for."""
SCOUTS = 3
"""Prompts that set the chances of tokens, as in `gradients.timed`."""
Columns = dict[str, np.ndarray]
"""Of the tokens: group, interval, logits (‖e − π‖), rest (1−π), weight, norm (‖g‖)."""


@dataclass(frozen=True)
class Cell:
    """Where coverage is asked for."""

    world: str
    truth: str
    """batch, prompts or whole."""
    design: str
    prompts: int
    each: int | None
    """Measured tokens of each interval; None: all."""


def plant(kind: str, rng: np.random.Generator, prompts: int = 600, tokens: int = 60) -> Columns:
    """A world whose norms follow ‖e − π‖ up to noise; prompts differ in size."""
    size = prompts * tokens
    group = np.repeat(np.arange(prompts), tokens)
    interval = rng.choice(INTERVALS, size, p=[0.25, 0.2, 0.15, 0.4])
    rest = 1 - rng.uniform(interval / 4, (interval + 1) / 4)
    logits = rest * rng.uniform(1, 1.41, size)
    weight = rng.choice([-1.0, 1.0], size) * np.exp(0.3 * rng.standard_normal(prompts))[group]
    noise = {"even": 0.15, "heavy-tailed": 0.6, "one-dominates": 0.3}[kind]
    norm = logits * np.exp(noise * rng.standard_normal(size))
    if kind == "one-dominates":
        weight[rng.integers(tokens, size=prompts) + tokens * np.arange(prompts)] *= 8
    return {"group": group, "interval": interval, "logits": logits, "rest": rest, "weight": weight, "norm": norm}


def read(path: Path) -> Columns:
    """A measured table, of prompts that have a gradient."""
    table = pd.read_parquet(path)
    table = table[table["weight"].ne(0).groupby(table["group"]).transform("any")]
    names = {"logits": "logit_grad_norm", "weight": "weight", "norm": "param_grad_norm"}
    columns = {name: table[column].to_numpy(np.float64) for name, column in names.items()}
    columns |= {
        "interval": table["interval"].to_numpy(np.int64),
        "rest": np.exp(table["log_one_minus_prob"].to_numpy()),
    }
    return columns | {"group": np.unique(table["group"], return_inverse=True)[1]}


def statistics_of(own: Columns, taken: np.ndarray, chances: np.ndarray, size: int) -> tuple[Evaluate, np.ndarray]:
    """Return a function of prompts' weights, and the sums [6, prompts, INTERVALS] that it uses.

    It gives [draws, 4, INTERVALS] as `token_shares` and `summarize` do: shares of the tokens, of Σ‖w·g‖² and of
    Σ(w·(1−π))², and the mean ‖g‖. The sums begin with those of tokens, measured tokens, energy and (w·(1−π))².
    """
    cell = own["group"] * INTERVALS + own["interval"]
    scaled, logits = taken / chances, own["logits"]
    energies = (own["weight"] * logits) ** 2
    columns = [np.ones(len(cell)), taken, scaled * (own["weight"] * own["norm"]) ** 2]
    columns += [(own["weight"] * own["rest"]) ** 2, scaled * own["norm"]]
    columns += [energies, scaled * energies, logits, scaled * logits]
    sums = np.stack([np.bincount(cell, column, size * INTERVALS).reshape(size, INTERVALS) for column in columns])

    def evaluate(weights: np.ndarray) -> np.ndarray:
        tokens, _, energy, predicted, norms, *proxies = weights @ sums
        with np.errstate(invalid="ignore", divide="ignore"):  # none was measured, or has energy
            totals = np.where(proxies[0] > 0, proxies[0] * energy / proxies[1], 0.0)
            shares = [part / part.sum(1, keepdims=True) for part in (tokens, totals, predicted)]
            out = np.stack([*shares, proxies[2] * norms / proxies[3] / tokens], axis=1)
        return np.where(np.isfinite(out) & (tokens > 0)[:, None], out, np.nan)

    return evaluate, sums


def values_of(found: np.ndarray) -> np.ndarray:
    """Return the STATISTICS [draws, 4·INTERVALS] of what `statistics_of` evaluates."""
    tokens, share, predicted, norm = np.moveaxis(found, 1, 0)
    with np.errstate(invalid="ignore", divide="ignore"):
        out = np.hstack([share, np.log2(share / tokens), np.log2(share / predicted), norm])
    return np.where(np.isfinite(out), out, np.nan)


def intervals_of(own: Columns, cell: Cell, rng: np.random.Generator, resamples: int) -> dict[str, np.ndarray]:
    """Return values and bounds [3, 4·INTERVALS] from one sample of a batch: `after` and, with resamples, `before`."""
    design = "proportional" if cell.design == "all" else cell.design
    taken, chances = np.ones(len(own["norm"]), dtype=bool), np.ones(len(own["norm"]))
    if cell.design == "by prompt":
        taken, chances = _draw_by_prompt(own, cell, rng)
    elif cell.each is not None:
        sizes = token_sizes(design, own["interval"], own["logits"], own["weight"])
        sample = TokenSample(own["interval"], INTERVALS, sizes, rng)
        taken, chances = sample.take(cell.each), sample.probabilities(cell.each)
    evaluate, (_, measured, energy, predicted, *_) = statistics_of(own, taken, chances, cell.prompts)
    draws = evaluate(np.ones((0 if short_of(cell.prompts) else 1, cell.prompts)))
    found = []
    for name, place in STATISTICS.items():
        amounts = own["logits"] if name == "mean_norm" else (own["weight"] * own["rest"]) ** 2
        worth = effective_sample_size(amounts, chances, own["interval"], INTERVALS)
        drawn = None if cell.each is None else effective_tokens(worth, measured.sum(0))
        args = (lambda w, place=place: evaluate(w)[:, place], cell.prompts, draws[:, place])
        if name.endswith("index"):
            share = bound(lambda w: evaluate(w)[:, 1], cell.prompts, draws[:, 1], scale=SHARE, measured=drawn)
            under = bound(lambda w, n=place[1]: evaluate(w)[:, n], cell.prompts, draws[:, place[1]], scale=SHARE)
            numbers = bound_bits(*args, [share, under], measured=drawn)
        else:
            numbers = bound(*args, scale=SIZE if name == "mean_norm" else SHARE, measured=drawn)
        value = worth if name == "mean_norm" else effective_size_of_shares(predicted.sum(0), worth)
        counted = measured if name == "mean_norm" else energy
        numbers[1:, [short_of(*each) is not None for each in zip((counted > 0).sum(0), value, strict=True)]] = np.nan
        found.append(numbers)
    out = {"after": np.hstack(found)}
    if resamples:
        redrawn = evaluate(rng.multinomial(cell.prompts, np.full(cell.prompts, 1 / cell.prompts), size=resamples))
        bounds = percentiles(values_of(redrawn), 0.95)
        bounds[:, np.tile((measured > 0).sum(0) < 2, len(STATISTICS))] = np.nan
        out["before"] = np.vstack([out["after"][:1], bounds])
    return out


def _draw_by_prompt(own: Columns, cell: Cell, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draw tokens as `--minutes` does: prompt by prompt, with chances set by the first ones."""
    tokens = pd.DataFrame({name: own[name] for name in ("interval", "weight")} | {"logit_grad_norm": own["logits"]})
    each = [tokens[own["group"] == prompt] for prompt in range(cell.prompts)]
    sample = ThresholdSample(pd.concat(each[:SCOUTS]), SCOUTS, INTERVALS, "proportional", int(rng.integers(2**32)))
    taken = np.zeros(len(tokens), dtype=bool)
    for prompt, part in enumerate(each):
        taken[part.index] = sample.take(part, prompt, cell.each)
    return taken, sample.probabilities(tokens, cell.each)


def cover(cell: Cell, world: Columns, draws: int, before: int, resamples: int, seed: int = 0) -> list[dict]:
    """Return a cell's rows, one per statistic and method. before: draws for `before`, each with this many resamples."""
    entropy = [seed, cell.prompts, cell.each or 0, *map(ord, cell.world + cell.truth + cell.design)]
    rng = np.random.default_rng(entropy)
    rows = np.split(np.argsort(world["group"], kind="stable"), np.cumsum(np.bincount(world["group"]))[:-1])

    def true(own: Columns, size: int) -> np.ndarray:
        everything = np.ones(len(own["norm"]))
        return values_of(statistics_of(own, everything > 0, everything, size)[0](np.ones((1, size))))[0]

    if cell.truth == "whole":
        rows = rows[: 4 * cell.prompts]
        index = np.concatenate(rows)
        world = {name: values[index] for name, values in world.items()}
        world["group"] = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
        rows = np.split(np.arange(len(index)), np.cumsum(np.bincount(world["group"]))[:-1])
    truth = true(world, len(rows))
    hits = {"after": [], "before": []}
    # Of too few prompts there is no interval, whatever is drawn.
    for number in range(before if short_of(cell.prompts) else draws):
        if cell.truth != "batch" or number % BATCHES == 0:
            picks = rng.choice(len(rows), cell.prompts, replace=cell.truth != "whole")
            index = np.concatenate([rows[pick] for pick in picks])
            own = {name: values[index] for name, values in world.items()}
            own["group"] = np.repeat(np.arange(cell.prompts), [len(rows[pick]) for pick in picks])
            wanted = true(own, cell.prompts) if cell.truth == "batch" else truth
        for method, (value, lower, upper) in intervals_of(own, cell, rng, resamples * (number < before)).items():
            hit = np.where(np.isnan(lower), np.nan, (lower <= wanted) & (wanted <= upper))
            hits[method].append(np.where(np.isnan(value) | np.isnan(wanted), -1.0, hit))
    return [row for method, found in hits.items() if found for row in _rows(cell, method, np.array(found))]


def _rows(cell: Cell, method: str, found: np.ndarray) -> Iterator[dict]:
    """Yield a cell's rows.

    found: [draws, 4·INTERVALS], 1 where the truth is held, NaN without bounds, −1 where there is no number.
    """
    for name, part in zip(STATISTICS, np.split(found, len(STATISTICS), axis=1), strict=True):
        known, printed = part != -1, (part != -1) & ~np.isnan(part)
        row = vars(cell) | {"statistic": name, "method": method, "draws": len(found)}
        row["printed"] = printed.sum() / max(known.sum(), 1)
        row["coverage"] = part[printed].mean() if printed.any() else np.nan
        often = printed.sum(0) >= max(0.1 * len(found), 1)
        each = [part[printed[:, a], a].mean() for a in np.flatnonzero(often)]
        yield row | {"worst_interval": min(each, default=np.nan)}


def list_whole_cells(worlds: list[str]) -> Iterator[Cell]:
    """Yield the cells in which some of a batch's prompts are looked at, as `--minutes` does."""
    for world in worlds:
        for prompts in (6, 8, 12):
            for each in (3, 8, 25):
                yield Cell(world, "whole", "by prompt", prompts, each)


def list_cells(worlds: list[str]) -> Iterator[Cell]:
    for world in worlds:
        for prompts in (1, 3, 5, 6, 10, 30):
            yield Cell(world, "prompts", "all", prompts, None)
            for design in ("proportional", "stratified"):
                for each in (8, 16, 32, 64):
                    for truth in ("batch", "prompts"):
                        yield Cell(world, truth, design, prompts, each)


def main(
    tables: Path | None = None,
    out: Path = Path("figures/verdicts/data/verdicts_coverage.csv"),
    draws: int = 2000,
    before: int = 2000,
    resamples: int = 400,
    processes: int = 2,
    whole: bool = False,
) -> None:
    """tables: folder of measured tables; before: draws of each cell for `before`; resamples: of each of these;
    whole: only the cells of whole batches."""
    worlds = {kind: plant(kind, np.random.default_rng(number)) for number, kind in enumerate(PLANTED)}
    worlds |= {path.stem: read(path) for path in sorted(tables.glob("*.parquet"))} if tables else {}
    cells, rows = list((list_whole_cells if whole else list_cells)(list(worlds))), []
    with Pool(processes) as pool:
        jobs = [pool.apply_async(partial(cover, cell, worlds[cell.world], draws, before, resamples)) for cell in cells]
        for job in tqdm(jobs, "cells"):
            rows += job.get()
    table = pd.DataFrame(rows).sort_values(["method", "worst_interval"]).astype({"each": "Int64"})
    table.to_csv(out, index=False, float_format="%.4f")
    for method, part in table.groupby("method"):
        print(f"{method}\n{part.head(30).drop(columns='method').to_string(index=False)}")
        short = part[part["worst_interval"] < 0.93]
        print(f"below .93: {len(short)} of {part['coverage'].notna().sum()} with intervals, of {len(part)}\n")


if __name__ == "__main__":
    exit_with(lambda: tyro.cli(main))
