"""How many tokens one step moves in the direction of their advantage: predicted, and in a real step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import isnan

import numpy as np
import pandas as pd

from gradscope import plots
from gradscope.diagnosis.findings import Finding, Verdict, judge
from gradscope.diagnosis.format import drop_vacuous, says_nothing, share_words, step_words
from gradscope.diagnosis.measured import Measured
from gradscope.diagnosis.page.page import Block
from gradscope.diagnosis.page.sheets import OVER_PROMPTS, Sheets, csv, define, redraw
from gradscope.diagnosis.result import Diagnosis
from gradscope.diagnosis.rows import Rows, join_rows, make_rows
from gradscope.diagnosis.update import SIGNS as SIGN_WORDS
from gradscope.intervals import name_interval
from gradscope.plots import make_series
from gradscope.resampling import Seed
from gradscope.updates import SIGNS, right_direction_shares

TITLE = "What one step does"
ASKS = ("predicted_step", "real_step")
FOLLOWED = {
    ("right_direction_positive_actual", "none"): ("Â > 0: share that rose", "", "all"),
    ("right_direction_negative_actual", "none"): ("Â < 0: share that fell", "", "all"),
}
LABELS = {
    "right_direction_positive_actual": "Â > 0: share that rose",
    "right_direction_negative_actual": "Â < 0: share that fell",
    "right_direction_positive_predicted": "Â > 0: share predicted to rise",
    "right_direction_negative_predicted": "Â < 0: share predicted to fall",
}
DEFINITIONS = {
    "right direction": (
        "Among tokens with a positive advantage that moved, the share whose probability rose in the step; among those "
        "with a negative advantage, the share whose probability fell. Chance gives one half. Responses that share a "
        "prefix but differ in sign pull the same token both ways, so some wrong directions are unavoidable."
    ),
}
WAYS = {"positive": ("rose", "likelier"), "negative": ("fell", "less likely")}
LOOKS = {"predicted": 1, "actual": 2}


def rows(m: Measured) -> Rows:
    """The rows of `direction_rows` for the predicted and the real step; directions, their table, with a column kind;
    movement, of the real step's tokens."""
    parts, frames = [], {}
    if "predicted_step" in m.made:
        moved = m.made["predicted_step"].influence.contributions
        moved = moved.assign(**{"delta_log_odds.all": moved["predicted"].astype(np.float64)})
        parts.append(direction_rows(moved, "predicted", m.labels, **m.draws("directions")))
    if "real_step" in m.made:
        frames["movement"] = m.made["real_step"]
        parts.append(direction_rows(m.made["real_step"], "actual", m.labels, **m.draws("directions.actual")))
    frames["directions"] = pd.concat([table for _, table in parts], ignore_index=True)
    return Rows(join_rows([told for told, _ in parts]), frames, unweighted=("movement",))


def direction_rows(
    table: pd.DataFrame, kind: str, labels: Sequence[str], *, seed: Seed = 0, resamples: int = 1000
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Compute the share of moved tokens with Â > 0 that rose, and with Â < 0 that fell, by interval of π_old.

    table: with delta_log_odds.all, interval, advantage and group. kind: "predicted" or "actual", for the names
    right_direction_positive_KIND and right_direction_negative_KIND. The interval "all" has all tokens.
    """
    parts, frames = [], []
    settings = {"seed": seed, "resamples": resamples}
    for by, values, names in (("interval", range(len(labels)), list(labels)), ("every", [0], ["all"])):
        shares = right_direction_shares(table.assign(every=0), by=by, values=values, **settings)
        for sign in SIGNS:
            own = shares[shares["sign"] == sign]
            found = own[["share", "lower", "upper"]]
            moved = (own["num_tokens"] - own["tied"]).to_numpy()
            name = f"right_direction_{sign}_{kind}"
            parts.append(make_rows(name, found.to_numpy(np.float64).T, moved, unit="share", intervals=names))
        frames.append(shares.drop(columns=[by]).assign(interval=np.repeat(names, len(SIGNS)), kind=kind))
    return join_rows(parts), pd.concat(frames, ignore_index=True)


def say(found: Diagnosis) -> list[Finding]:
    """Say how many tokens moved in the direction of their advantage, in the actual step or else the predicted one."""
    if found.scope.supply.too_few:
        return []
    said = [made for sign in SIGNS if (made := _judge(found, sign)) is not None]
    if {finding.verdict for finding in said} == {Verdict.MORE, Verdict.LESS}:
        # If one sign gains what the other loses, all tokens move alike, which is no success of either.
        words = " Tokens of both signs mostly move the same way."
        said = [
            replace(one, statement=one.statement + words, brief=one.brief and one.brief + words, tone="warn")
            for one in said
        ]
    return said


def _judge(found: Diagnosis, sign: str) -> Finding | None:
    kind = "actual" if found.pick(f"right_direction_{sign}_actual", "none", "all") is not None else "predicted"
    name, word, way = f"right_direction_{sign}_{kind}", SIGN_WORDS[sign], WAYS[sign][1]
    row = found.pick(name, "none", "all")
    if row is None or isnan(row["value"]):
        return None
    step = step_words(found.scope.step)
    done = f"In one {step} step on this batch" if kind == "actual" else "In one predicted step"
    statement = f"{done}, of the {row['n']:,} tokens with {word} that moved, {share_words(row)} became {way}"
    each = [(label, found.pick(name, "none", label)) for label in found.labels]
    parts = "; ".join(
        f"{name_interval(label)}: {share_words(r)} of {r['n']:,}" for label, r in each if not isnan(r["value"])
    )
    verdict = judge(row, 0.5)
    judged = not isnan(row["lower"]) and not says_nothing(row)
    end = ": no detectable difference from one half" if judged else ""
    end = {Verdict.MORE: ", more than half", Verdict.LESS: ", less than half"}.get(verdict, end)
    brief = f"{done}, of the tokens with {word} that moved, " + {
        Verdict.MORE: f"more than half became {way}.",
        Verdict.LESS: f"less than half became {way}.",
    }.get(verdict, f"about half became {way}: no detectable difference.")
    tone = "warn" if verdict is Verdict.LESS else "plain"
    detail = f"By interval of π before the step: {parts}."
    about = ((name, "none", "all"),)
    return Finding(f"direction_{sign}", verdict, f"{statement}{end}.", detail, tone, brief if end else "", about=about)


def show(found: Diagnosis, sheets: Sheets) -> list[Block]:
    blocks: list[Block] = []
    directions, movement = found.frames["directions"], found.frames.get("movement")
    if movement is not None:
        edges = found.scope.settings.edges
        sheets.keep("moved", movement[["interval", "advantage", "delta_prob.all"]])
        blocks.append(
            sheets.figure(
                "movement",
                lambda: plots.plot_movement(movement, "all", edges=edges),
                "Fig. 1 (c) of the paper on this batch: how far one step moves the tokens of each interval, by the "
                "sign of their advantage; weights are as before afterwards.",
                again=redraw(plots.plot_movement, csv("moved"), edges=edges),
            )
        )
    parts = []
    for sign, (moved, _) in WAYS.items():
        for kind, look in LOOKS.items():
            own = directions[(directions["kind"] == kind) & (directions["sign"] == sign)]
            if len(own):
                own = drop_vacuous(own.rename(columns={"interval": "at", "share": "value"}))
                panel = f"{SIGN_WORDS[sign]}: share that {moved}"
                parts.append(make_series(own, found.labels, f"{kind} step", look, panel=panel, factor=100.0))
    sheets.keep("directions", directions)
    look = {"ylabel": "share of the tokens (%)", "xlabel": "$π_{old}$ before the step", "rule": 50, "size": (3.2, 2.6)}
    caption = (
        "Fig. 3 of the paper on this batch: of the tokens of each interval and sign of Â, the share that moves the "
        "right way, in the step predicted to first order and in the one that was taken. One half is chance."
    )
    drawn = sheets.series("right_directions", pd.concat(parts), caption, bars=OVER_PROMPTS, **look)
    return [*blocks, drawn, *define(DEFINITIONS)]
