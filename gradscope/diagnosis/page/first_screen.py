"""The first screen of a diagnosis: the main result in at most three sentences, a figure, and four numbers.

It alone chooses among parts; one that was not made is passed over.
"""

from __future__ import annotations

from math import isnan

import pandas as pd

from gradscope.diagnosis.findings import Findings, Verdict, judge
from gradscope.diagnosis.format import VACUOUS, as_sentence, percent, says_nothing, share_words, step_words
from gradscope.diagnosis.page.page import Figure, Tile
from gradscope.diagnosis.page.sheets import OVER_PROMPTS, Sheets, series_of
from gradscope.diagnosis.result import Diagnosis
from gradscope.gradients import PARAMETERS
from gradscope.intervals import name_interval
from gradscope.resampling import FEWEST, TOO_FEW, in_brackets
from gradscope.runs import counted

HEADLINES = ("update", "wanted", "dominance_raw")
"""Kinds of the findings that are stated first, the best first; of too few prompts, the last."""
HOLDERS, WANTED = "holders", "wanted"
"""Kinds of the findings that say which tokens the summed gradient is made of, and whether other prompts want it."""
NEXT = (HEADLINES[-1], "spikes", WANTED, "added")
"""Kinds of the findings that ask for something, most urgent first; others come last."""
DRAWN = (("token_share", "none", "of the tokens", 0), ("squared_share", "raw", "of the gradient energy", 2))
"""Series of the figure: statistic, metric, words and look; then those of the summed gradient."""
SUMMED = (("gradient_share", "raw", "of the summed gradient", 3),)
PARTED = (
    ("own_share", "raw", "of the gradient, with own prompts", 3),
    ("others_share", "raw", "of the gradient, with other prompts", 8),
)
"""The same, parted, where it is known."""


def advise(findings: Findings) -> tuple[str, ...]:
    """Return what to do next, most urgent first; never empty."""
    places = {kind: place for place, kind in enumerate(NEXT)}
    asking = sorted((f for f in findings if f.next), key=lambda finding: places.get(finding.kind, len(places)))
    return tuple(f.next for f in asking) or ("Nothing: this batch asks for no further measurement.",)


def decide(d: Diagnosis, *, brief: bool = False) -> tuple[str, ...]:
    """Return up to three paragraphs: what is large, in the sum and wanted; which tokens are; what comes next.

    Too few prompts for a verdict are the only one. brief: omit the numbers that `make_tiles` shows.
    """
    told = {finding.kind: finding for finding in d.findings}
    kinds = HEADLINES[-1:] if d.scope.supply.too_few else HEADLINES
    first = next((told[kind] for kind in kinds if kind in told), None)
    statement = "" if first is None else (brief and first.brief) or first.statement
    if d.scope.supply.too_few and first is not None and first.verdict is Verdict.UNDECIDED:
        return (statement,)
    todo = f"Next: {_lower(d.advice[0])}" if d.advice else ""
    summed = "" if first is not None and first.kind == HEADLINES[0] else _summed(d)
    others = [told[kind].statement for kind in (HOLDERS, WANTED) if kind in told and told[kind] is not first]
    return tuple(filter(None, (statement, " ".join(filter(None, (summed, *others))), todo)))


def _lower(words: str) -> str:
    return words[:1].lower() + words[1:]


def _summed(d: Diagnosis) -> str:
    share = d.pick("gradient_share", "raw", d.scope.low)
    if share is None or isnan(share["value"]):
        return ""
    low, summed = name_interval(d.scope.low), d.scope.summed_prompts
    of = "the summed gradient" if d.scope.all_summed else f"the summed gradient of {summed}"
    words = f"Tokens with {low} account for {share_words(share)} of {of}"
    if isnan(share["lower"]) and share["lacks"] == "prompts":
        why = f"{summed} were summed, and {FEWEST} with a gradient there are needed"
        return f"{TOO_FEW} whose the summed gradient is: {why}."
    if says_nothing(share):
        words = f"How much of {of} tokens with {low} account for cannot be told"
    return f"{words}."


def make_tiles(d: Diagnosis) -> tuple[Tile, ...]:
    """Return the available tiles: share of the tokens and of the energy, signal fraction, right direction.

    Where prompts are too few for a verdict, only how many there are, and how many tokens were measured.
    """
    supply = d.scope.supply
    if supply.too_few:
        measured, whole = int(d.table[PARAMETERS].notna().sum()), d.scope.of_tokens
        counts = f"{supply.informative:,} of {supply.prompts:,}"
        prompts = Tile("prompts with a gradient", counts, f"a verdict needs {FEWEST}")
        return prompts, Tile("tokens measured", f"{measured:,} of {whole:,}")
    low, tiles = d.scope.low, []
    shares = (("token_share", "none", "share of the tokens"), ("squared_share", "raw", "share of the gradient energy"))
    for statistic, metric, label in shares:
        row, name = d.pick(statistic, metric, low), f"{name_interval(low)}: {label}"
        if row is not None and says_nothing(row):
            tiles.append(Tile(name, "not known", "its 95 % bounds allow almost every share"))
        elif row is not None and not isnan(row["value"]):
            tiles.append(_tile(name, row, ""))
    signal = d.pick("signal_fraction", "raw", "all")
    if signal is not None and not isnan(signal["lower"]):
        if judge(signal) is Verdict.MORE:
            tiles.append(_tile("signal fraction", signal, "of the summed gradient of all tokens"))
        elif signal["upper"] >= VACUOUS:
            tiles.append(Tile("signal fraction", "not known", "its 95 % bounds allow almost every share"))
        else:
            most = f"at most {percent(max(signal['upper'], 0.0))} % of the summed gradient (95 % bound)"
            tiles.append(Tile("signal fraction", "not told from 0", most))
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
        told += f", in {which} {step_words(d.scope.step)} step; 50 % is chance"
        if {judge(row, 0.5) for _, row in known} == {Verdict.MORE, Verdict.LESS}:
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


def make_lead(d: Diagnosis, sheets: Sheets) -> Figure | None:
    """Return the first screen's figure, or None without shares of the gradient energy, or too few prompts for them."""
    if d.pick("squared_share", "raw", d.scope.low) is None or d.scope.supply.too_few:
        return None
    prompts, of_prompts = d.scope.supply.prompts, d.scope.of_prompts
    caption = f"Each probability interval's share {shares_words(d)}"
    precision = next((own.kept["precision"] for own in d.rows.values() if "precision" in own.kept), None)
    if precision is not None:
        caption += f" {as_sentence(precision)}"
    if prompts < of_prompts:
        caption += f" These are {prompts:,} of the {of_prompts:,} prompts; four times as many would halve the "
        caption += "bounds' distance, and take four times the minutes."
    summed = SUMMED if d.pick("own_share", "raw", d.scope.low) is None else PARTED
    series = series_of(d.statistics, d.labels, DRAWN + summed, factor=100.0)
    look = {"ylabel": "share (%)", "xlabel": "π of the tokens", "size": (4.6, 2.5), "limits": (None, 100.0)}
    drawn = sheets.series("shares", series, caption, bars=OVER_PROMPTS, **look)
    return drawn if isinstance(drawn, Figure) else None


def shares_words(d: Diagnosis, *, predicted: bool = False) -> str:
    """End a caption with the series that are drawn, and the prompts of each."""
    energy, prompts = "of the gradient energy (tokens one by one)", counted(d.scope.supply.prompts, "prompt")
    energy = f"of what (1−π)² alone predicts, and {energy}" if predicted else f"and {energy}"
    summed = d.pick("gradient_share", "raw", d.scope.low)
    if summed is None or isnan(summed["value"]):
        return f"of the tokens, {energy}, over {prompts}."
    left = "of the summed gradient (what is left after they cancel)"
    if d.scope.all_summed or (not predicted and d.pick("own_share", "raw", d.scope.low) is not None):
        return f"of the tokens, {energy.removeprefix('and ').replace(', and', ',')} and {left}."
    return f"of the tokens, {energy}, over {prompts}; and {left} over {d.scope.summed:,} of them."
