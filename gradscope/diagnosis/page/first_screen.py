"""The first screen of a diagnosis: the main result in at most three sentences, and four numbers."""

from __future__ import annotations

from math import isnan

import pandas as pd

from gradscope.diagnosis.format import name_interval, percent, says_nothing, share_words, step_words
from gradscope.diagnosis.page.page import Tile
from gradscope.diagnosis.result import VERDICT_PROMPTS, Diagnosis, Findings, Verdict
from gradscope.diagnosis.words import compare, lack_words
from gradscope.gradients import PARAMETERS
from gradscope.resampling import TOO_FEW, in_brackets


def decide(d: Diagnosis, findings: Findings, *, brief: bool = False) -> tuple[str, ...]:
    """Return up to three sentences: whose energy and whose summed gradient it is, how much is signal, what comes next.

    Too few prompts or tokens for a verdict are the only sentence. brief: omit the numbers that `make_tiles` shows
    beside them.
    """
    [first] = [finding for finding in findings if finding.kind == "dominance_raw"]
    statement = (brief and first.brief) or first.statement
    if d.supply.too_few and first.verdict is Verdict.UNDECIDED:
        return (statement,)
    todo = f"Next: {_lower(d.advice[0])}" if d.advice else ""
    return tuple(filter(None, (statement, _summed(d, brief=brief), todo)))


def _lower(words: str) -> str:
    return words[:1].lower() + words[1:]


def _summed(d: Diagnosis, *, brief: bool) -> str:
    share, signal = d.pick("gradient_share", "raw", d.labels[0]), d.pick("signal_fraction", "raw", "all")
    if share is None or isnan(share["value"]):
        return ""
    low, whole = name_interval(d.labels[0]), d.sums_prompts in (None, d.num_prompts)
    of = "the summed gradient" if whole else f"the summed gradient of {d.summed_prompts}"
    words = f"Tokens with {low} account for {share_words(share)} of {of}"
    if isnan(share["lower"]) and share["lacks"] == "prompts":
        summed = f"{d.summed_prompts} were summed, and {VERDICT_PROMPTS} with a gradient there are needed"
        return f"{TOO_FEW} whose the summed gradient is: {summed}."
    if says_nothing(share):
        words = f"How much of {of} tokens with {low} account for cannot be told"
    if signal is None or isnan(signal["lower"]):
        why = "" if signal is None else lack_words(signal)
        return f"{words}; its signal was not judged ({why})." if why else f"{words}."
    if compare(signal) is Verdict.MORE and brief:
        return f"{words}. The whole summed gradient has signal, which other prompts would share."
    if compare(signal) is Verdict.MORE:
        return f"{words}. {share_words(signal)} of the whole summed gradient is signal that other prompts would share."
    few = f"{d.summed_prompts[:1].upper()}{d.summed_prompts[1:]} are too few to separate it from noise"
    return f"{words}. {few}."


def make_tiles(d: Diagnosis) -> tuple[Tile, ...]:
    """Return the available tiles: share of the tokens and of the energy, signal fraction, right direction.

    Where prompts are too few for a verdict, only how many there are, and how many tokens were measured.
    """
    if d.supply.too_few:
        measured, whole = int(d.table[PARAMETERS].notna().sum()), d.of_tokens
        counts = f"{d.num_informative_prompts:,} of {d.num_prompts:,}"
        prompts = Tile("prompts with a gradient", counts, f"a verdict needs {VERDICT_PROMPTS}")
        return prompts, Tile("tokens measured", f"{measured:,} of {whole:,}")
    low, tiles = d.labels[0], []
    shares = (("token_share", "none", "share of the tokens"), ("squared_share", "raw", "share of the gradient energy"))
    for statistic, metric, label in shares:
        row, name = d.pick(statistic, metric, low), f"{name_interval(low)}: {label}"
        if row is not None and says_nothing(row):
            tiles.append(Tile(name, "not known", "its 95 % interval allows almost every share"))
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
        value = " · ".join("not known" if says_nothing(row) else f"{percent(row['value'])} %" for _, row in known)
        told = " · ".join(
            f"{words}{'' if says_nothing(row) else in_brackets(row['lower'], row['upper'], percent)}"
            for words, row in known
        )
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
