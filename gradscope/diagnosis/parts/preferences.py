"""What one step does to chosen and rejected responses, and which side of the pairs does it, to first order."""

from __future__ import annotations

from math import isnan

import numpy as np
import pandas as pd

from gradscope.diagnosis.findings import Finding, Verdict, judge
from gradscope.diagnosis.format import percent, step_words
from gradscope.diagnosis.measured import Measured
from gradscope.diagnosis.page.page import Block
from gradscope.diagnosis.page.sheets import Sheets, define
from gradscope.diagnosis.result import Diagnosis
from gradscope.diagnosis.rows import Rows, join_rows, make_rows
from gradscope.diagnosis.terms import scaled_squares
from gradscope.resampling import bootstrap, in_brackets, short_of
from gradscope.runs import digits
from gradscope.updates import BY, SIDES

TITLE = "Chosen and rejected responses"
ASKS = ("predicted_step", "contributions")
SOURCES = {"chosen": "the chosen responses' gradient", "rejected": "the rejected ones'", "rest": "momentum and decay"}
LABELS = {
    **{f"{side}_change": f"Δ log π of {side} responses" for side in SIDES},
    **{f"{side}_change_by_{source}": f"of it by {words}" for side in SIDES for source, words in SOURCES.items()},
    "prefix_energy": "energy of what both sides begin with",
    "prefix_gradient": "of the gradient: what both sides begin with",
}
DEFINITIONS = {
    "predicted change of a response": (
        "To first order, one step changes the log π of each response, the sum over its tokens, by a sum of "
        "contributions: from the gradient of all chosen responses, from that of all rejected ones, and from momentum "
        "and weight decay. Means over responses, in nats; bounds are over pairs."
    ),
}


def rows(m: Measured) -> Rows:
    """For each side, CHANGE: the mean predicted change of a response's log π, in nats, and CHANGE_by_SOURCE, its parts;
    prefix_energy and prefix_gradient: what tokens that both sides of a pair begin with hold of Σ‖w·g‖² and of ‖G‖².
    """
    if not m.weighted or not m.settings.loss.has_sides:
        return Rows()
    parts = []
    if (step := m.made.get("predicted_step")) is not None:
        responses = step.rows.numpy()
        changes = step.influence.contributions.assign(chosen=m.batch.chosen.numpy()[responses][_places(step)])
        parts = _change_rows(changes, m)
    if "pair" in m.table:
        parts += _prefix_rows(m)
    return Rows(join_rows(parts))


def _places(step: object) -> np.ndarray:
    return step.influence.contributions["response"].to_numpy()


def _change_rows(changes: pd.DataFrame, m: Measured) -> list[pd.DataFrame]:
    """Return the rows of changes. changes: contributions, with `chosen` of each token."""
    rest = [name for name in changes if name.startswith(BY) and name.removeprefix(BY) not in SIDES]
    columns = {"": changes["predicted"], "_by_rest": changes[rest].sum(axis=1)}
    columns |= {f"_by_{side}": changes[f"{BY}{side}"] for side in SIDES}
    named = pd.DataFrame(columns).groupby([changes["group"], changes["response"], changes["chosen"] > 0]).sum()
    parts = []
    for side, chosen in zip(SIDES, (True, False), strict=True):
        own = named[named.index.get_level_values(2) == chosen]
        clusters = pd.factorize(own.index.get_level_values(0))[0]
        if not len(own):
            continue
        sums = np.stack([np.bincount(clusters, own[name]) for name in own] + [np.bincount(clusters)], axis=1)
        found = bootstrap(lambda w, sums=sums: _ratios(w @ sums), len(sums), **m.draws(f"preferences.{side}"))
        short = short_of(len(sums))
        for place, name in enumerate(own):
            numbers = found[:, place : place + 1]
            parts.append(make_rows(f"{side}_change{name}", numbers, len(own), unit="nats", short=[short]))
    return parts


def _ratios(sums: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):  # none of this side was drawn
        return sums[:, :-1] / sums[:, -1:]


def _prefix_rows(m: Measured) -> list[pd.DataFrame]:
    table = m.table
    shared = shared_prefix(table)
    squares = scaled_squares(table)
    parts = {"prefix_energy": np.nansum(squares[shared]) / np.nansum(squares)}
    found = m.made.get("contributions")
    if found is not None and found.square_norm > 0:
        parts["prefix_gradient"] = float(found.gradient_share.numpy()[shared].sum())
    bare = {name: np.array([[value], [np.nan], [np.nan]]) for name, value in parts.items()}
    return [make_rows(name, own, int(shared.sum()), unit="share") for name, own in bare.items()]


def shared_prefix(table: pd.DataFrame) -> np.ndarray:
    """Return the mask of tokens that both responses of a pair begin with, [n].

    >>> table = pd.DataFrame({"pair": 0, "response": [0, 0, 1, 1], "token_id": [5, 6, 5, 7]})
    >>> shared_prefix(table).tolist()
    [True, False, True, False]
    """
    shared = np.zeros(len(table), dtype=bool)
    for _, pair in table.reset_index(drop=True).groupby("pair"):
        sides = [own.index.to_numpy() for _, own in pair.groupby("response")]
        if len(sides) != 2:
            continue
        size = min(map(len, sides))
        one, other = (table["token_id"].to_numpy()[side[:size]] for side in sides)
        equal = np.logical_and.accumulate(one == other)
        for side in sides:
            shared[side[:size][equal]] = True
    return shared


def say(found: Diagnosis) -> list[Finding]:
    """Say which way a step moves each side, by whose gradient, and what a shared beginning holds."""
    told = [one for side in SIDES if (one := _of_side(found, side)) is not None]
    return told + _of_prefix(found)


def _of_side(d: Diagnosis, side: str) -> Finding | None:
    row = d.pick(f"{side}_change", "none")
    if row is None or isnan(row["value"]) or d.scope.supply.too_few:
        return None
    each = {name: d.pick(f"{side}_change_by_{name}", "none") for name in SOURCES}
    parts = ", ".join(f"{_signed(own)} by {SOURCES[name]}" for name, own in each.items() if own["value"])
    verdict = judge(row, write=digits)
    way = {Verdict.LESS: "it falls", Verdict.MORE: "it rises"}.get(verdict, "whether it rises or falls is undecided")
    statement = (
        f"In one {step_words(d.scope.step)} step, to first order, log π of a {side} response changes by {_signed(row)} "
        f"nats on average: {way}. Of it, {parts}."
    )
    wrong = {"chosen": Verdict.LESS, "rejected": Verdict.MORE}[side] is verdict
    about = ((f"{side}_change", "none", ""),)
    return Finding(f"{side}_change", verdict, statement, tone="warn" if wrong else "plain", about=about)


def _signed(row: pd.Series) -> str:
    return f"{digits(row['value'])}{in_brackets(row['lower'], row['upper'], digits)}"


def _of_prefix(d: Diagnosis) -> list[Finding]:
    energy, gradient = d.pick("prefix_energy", "none"), d.pick("prefix_gradient", "none")
    if energy is None or gradient is None or not energy["n"]:
        return []
    statement = (
        f"{energy['n']:,} tokens are what both responses of their pair begin with. They have "
        f"{percent(energy['value'])} % of the gradient energy and {percent(gradient['value'])} % of the summed gradient"
    )
    detail = "Equal beginnings have equal gradients, with weights of opposite sign; where both are equally large, as "
    detail += "in DPO, they cancel exactly: shares show it, energy does not."
    return [Finding("prefix", Verdict.FACT, f"{statement}.", detail)]


def show(found: Diagnosis, sheets: Sheets) -> list[Block]:
    changes = found.statistics[found.statistics["statistic"].isin([name for name in LABELS if "_change" in name])]
    if not len(changes):
        return []
    shown = ["statistic", "value", "lower", "upper", "n"]
    caption = "Predicted change of a response's log π in one step, by side and by whose gradient causes it (nats)."
    return [sheets.table("preferences", changes[shown].replace({"statistic": LABELS}), caption), *define(DEFINITIONS)]
