"""Whose gradient moves which interval in one step, to first order."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan

import numpy as np
import pandas as pd

from gradscope import plots
from gradscope.diagnosis.findings import Finding, Verdict, judge
from gradscope.diagnosis.format import says_nothing, share_words, step_words
from gradscope.diagnosis.measured import Measured
from gradscope.diagnosis.page.page import KEYS, Block
from gradscope.diagnosis.page.sheets import Sheets, csv, define, readable, redraw
from gradscope.diagnosis.result import Diagnosis
from gradscope.diagnosis.rows import Rows, join_rows, make_rows
from gradscope.intervals import name_interval
from gradscope.resampling import Seed
from gradscope.updates import BY, influence_table, moved_against

TITLE = "Influence between intervals"
ASKS = ("predicted_step",)
FOLDED = True
FOLLOWED = {("low_to_high_share", "none"): ("movement caused by the lowest", "", -1)}
LABELS = {
    "low_to_high_share": "movement caused by the lowest interval",
    "high_to_high_share": "movement caused by its own interval",
}
DEFINITIONS = {
    "influence between intervals": (
        "To first order, a step changes each token's log π by a sum of contributions: from the gradient of each "
        "interval, KL, momentum and weight decay. A source's share is Cov(its contribution, the total)/Var(the total) "
        "over the affected tokens; shares add up to 1 and may be negative. Intervals here refer to π before the step."
    ),
}


def rows(m: Measured) -> Rows:
    """The rows of `influence_rows`; influence, its table; against, the tokens of `updates.moved_against`."""
    step = m.made["predicted_step"]
    told, table = influence_rows(step.influence.contributions, m.labels, **m.draws("influence"))
    against = moved_against(step.influence.contributions, m.settings.top)
    against = against.assign(response=step.rows.numpy()[against["response"]])
    return Rows(told, {"influence": table, "against": against}, unweighted=("against",))


def influence_rows(
    contributions: pd.DataFrame, labels: Sequence[str], *, seed: Seed = 0, resamples: int = 1000
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Compute low_to_high_share and high_to_high_share, and the influence table that they come from.

    low_to_high_share: how much of the predicted movement of the highest interval's tokens is due to the lowest
    interval's gradient, Cov(c, Δ)/Var(Δ); negative if it counteracts the rest. high_to_high_share: how much is due to
    the highest interval's own gradient. NaN if the interval has no gradient. The shares of all sources, including KL,
    momentum and decay, add up to 1.
    """
    table = influence_table(contributions, seed=seed, resamples=resamples)
    if f"{BY}0" not in contributions:  # preferences: by side
        return join_rows([]), table
    top = len(labels) - 1
    parts = []
    for name, source in (("low_to_high_share", 0), ("high_to_high_share", top)):
        row = table[(table["source"] == source) & (table["target"] == top)].iloc[0]
        found = row[["share", "share_lower", "share_upper"]].to_numpy(np.float64)[:, None]
        if not contributions[f"{BY}{source}"].any():
            found = np.full((3, 1), np.nan)
        parts.append(make_rows(name, found, row["num_tokens"], unit="share", intervals=[labels[top]]))
    return join_rows(parts), table


def say(found: Diagnosis) -> list[Finding]:
    """Say whose gradient moves the tokens of the highest interval."""
    low, top = found.labels[0], found.labels[-1]
    share, own = found.pick("low_to_high_share", "none", top), found.pick("high_to_high_share", "none", top)
    if share is None or isnan(share["value"]) or found.scope.supply.too_few:
        return []
    step = f"In one {step_words(found.scope.step)} step, to first order,"
    if says_nothing(share):
        words = (
            f"{step} it cannot be told how much tokens with {name_interval(low)} move those with {name_interval(top)}."
        )
        return [Finding("influence", Verdict.UNDECIDED, words)]
    statement = (
        f"{step} tokens with {name_interval(low)} account for "
        f"{share_words(share)} of the movement of tokens with {name_interval(top)}."
    )
    if judge(share) is Verdict.LESS:
        statement += " The negative share means that they oppose the overall movement."
    detail = f"Share of the variance of the predicted Δ log π of {share['n']:,} tokens; the shares of all sources add "
    detail += "up to 100 %, and are negative for sources that counteract. Their own interval accounts for "
    detail += share_words(own)
    table = found.frames["influence"]
    momentum = table[(table["source"] == "momentum") & (table["target"] == len(found.labels) - 1)]
    if len(momentum):
        bounds = {"share": "value", "share_lower": "lower", "share_upper": "upper"}
        detail += f", the momentum of earlier steps for {share_words(momentum.iloc[0][list(bounds)].rename(bounds))}"
    more = judge(share, own) is Verdict.MORE
    tone, verdict = ("warn", Verdict.MORE) if more else ("plain", Verdict.FACT)
    about = (("low_to_high_share", "none", top), ("high_to_high_share", "none", top))
    return [Finding("influence", verdict, statement, f"{detail}.", tone, about=about)]


def show(found: Diagnosis, sheets: Sheets) -> list[Block]:
    influence, against, edges = found.frames["influence"], found.frames["against"], found.scope.settings.edges
    blocks = [
        sheets.figure(
            "influence",
            lambda: plots.plot_influence(influence, edges=edges),
            "Whose gradient moves which interval: share of each column's movement that each source causes, to first "
            "order. Columns add up to 1.",
            again=redraw(plots.plot_influence, csv("influence"), edges=edges),
        )
    ]
    if len(against):
        caption = (
            "Tokens predicted to move farthest against their advantage: their change of log π, and the largest "
            "contribution to it in that direction (nats)."
        )
        shown = ["response", "position", "token", "old_prob", "advantage", "predicted", "mover", "mover_change"]
        if "token" in found.table:
            against = against.merge(found.table[[*KEYS, "token"]], on=KEYS, how="left")
        labels = {str(place): label for place, label in enumerate(found.labels)}
        against = against.assign(mover=against["mover"].replace(labels))
        blocks.append(sheets.table("against", readable(against), caption, shown, links=True))
    return blocks + define(DEFINITIONS)
