"""The first screen of a diagnosis: the main result in at most three sentences, and four numbers."""

from __future__ import annotations

from math import isnan

import pandas as pd

from gradscope.diagnosis.format import name_interval, percent, share_words, step_words
from gradscope.diagnosis.page.page import Tile
from gradscope.diagnosis.result import VERDICT_PROMPTS, Diagnosis, Findings, Verdict
from gradscope.diagnosis.words import compare, lack_words, says_nothing
from gradscope.resampling import in_brackets


def decide(d: Diagnosis, findings: Findings, *, brief: bool = False) -> tuple[str, ...]:
    """Return up to three sentences: whose energy and whose summed gradient it is, how much is signal, what comes next.

    brief: omit the numbers that `make_tiles` shows beside them.
    """
    [first] = [finding for finding in findings if finding.kind == "dominance_raw"]
    return tuple(filter(None, ((brief and first.brief) or first.statement, _summed(d, brief=brief), _next(d))))


def _summed(d: Diagnosis, *, brief: bool) -> str:
    share, signal = d.pick("gradient_share", "raw", d.labels[0]), d.pick("signal_fraction", "raw", "all")
    if share is None or isnan(share["value"]):
        return ""
    words = f"Tokens with {name_interval(d.labels[0])} account for {share_words(share)} of the summed gradient"
    if says_nothing(share):
        bounds = in_brackets(share["lower"], share["upper"], percent).strip()
        low = name_interval(d.labels[0])
        words = f"How much of the summed gradient tokens with {low} account for cannot be told: {bounds} %"
    if signal is None or isnan(signal["lower"]):
        if d.num_informative_prompts < VERDICT_PROMPTS:  # as the first sentence says
            return f"{words}."
        why = "" if signal is None else lack_words(d, signal)
        return f"{words}; signal is not distinguishable from noise ({why})." if why else f"{words}."
    if compare(signal) is Verdict.MORE and brief:
        return f"{words}. The whole summed gradient has signal, which other prompts would share."
    if compare(signal) is Verdict.MORE:
        return f"{words}. {share_words(signal)} of the whole summed gradient is signal that other prompts would share."
    noise = f"The whole summed gradient is not distinguishable from noise on {d.summed_prompts}"
    more = "sample more from this checkpoint" if d.sums_prompts in (None, d.of_prompts) else "give more minutes"
    return f"{words}. {noise}: {more} before you compare weightings."


def _next(d: Diagnosis) -> str:
    if d.comparison is None:
        return ""
    same = (d.comparison.table["same_as"] == "grpo").groupby(d.comparison.table["method"]).all().drop("grpo")
    found = f"{(~same).sum()} of {len(same)} other token weightings would change this update (below)"
    return f"{found}; no statistic of a single batch is known to predict a run's final accuracy."


def make_tiles(d: Diagnosis) -> tuple[Tile, ...]:
    """Return the available tiles: share of the tokens and of the energy, signal fraction, right direction."""
    low, tiles = d.labels[0], []
    shares = (("token_share", "none", "share of the tokens"), ("squared_share", "raw", "share of the gradient energy"))
    for statistic, metric, label in shares:
        row, name = d.pick(statistic, metric, low), f"{name_interval(low)}: {label}"
        if row is not None and says_nothing(row):
            bounds = in_brackets(row["lower"], row["upper"], percent).strip()
            tiles.append(Tile(name, "not known", f"95 % interval {bounds} %"))
        elif row is not None and not isnan(row["value"]):
            tiles.append(_tile(name, row, ""))
    signal = d.pick("signal_fraction", "raw", "all")
    if signal is not None and not isnan(signal["lower"]):
        if compare(signal) is Verdict.MORE:
            tiles.append(_tile("signal fraction", signal, "of the summed gradient of all tokens"))
        else:
            most = f"at most {percent(max(signal['upper'], 0.0))} % of the summed gradient (95 % interval)"
            tiles.append(Tile("signal fraction", "none seen", most))
    kind = next((kind for kind in ("actual", "predicted") if any(row is not None for row in _moved(d, kind))), "")
    moved = zip(("Â > 0 rose", "Â < 0 fell"), _moved(d, kind), strict=True)
    known = [(words, row) for words, row in moved if row is not None]
    if known:
        which = "one" if kind == "actual" else "a predicted"
        value = " · ".join(f"{percent(row['value'])} %" for _, row in known)
        told = " · ".join(f"{words}{in_brackets(row['lower'], row['upper'], percent)}" for words, row in known)
        told += f", in {which} {step_words(d)} step; 50 % is chance"
        if {compare(row, 0.5) for _, row in known} == {Verdict.MORE, Verdict.LESS}:
            told += ": tokens of both signs mostly move the same way"
        tiles.append(Tile("right direction", value, told))
    return tuple(tiles)


def _tile(label: str, row: pd.Series, of: str) -> Tile:
    bounds = in_brackets(row["lower"], row["upper"], percent).strip()
    return Tile(label, f"{percent(row['value'])} %", " ".join(filter(None, (bounds and f"{bounds} %", of))))


def _moved(d: Diagnosis, kind: str) -> list[pd.Series | None]:
    """Return the shares for tokens with Â > 0 and with Â < 0; None if unknown."""
    rows = [d.pick(f"right_direction_{sign}_{kind}", "none", "all") for sign in ("positive", "negative")]
    return [None if row is None or isnan(row["value"]) else row for row in rows]
