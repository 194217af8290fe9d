"""Lay out several checkpoints as one page: headline numbers over training, and links to each checkpoint's page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from gradscope.diagnosis.findings import Verdict, judge
from gradscope.diagnosis.format import as_sentence, drop_vacuous, percent, share_words, times, times_words
from gradscope.diagnosis.page.contents import Report
from gradscope.diagnosis.page.page import Finding, Links, Page, Section
from gradscope.diagnosis.page.sheets import Sheets, csv, define, redraw
from gradscope.diagnosis.parts import PARTS, gather
from gradscope.intervals import name_interval
from gradscope.plots import plot_trend
from gradscope.resampling import TOO_FEW
from gradscope.runs import counted


def make_trend_report(
    trend: pd.DataFrame,
    *,
    links: Sequence[tuple[str, str]] = (),
    notes: Sequence[str] = (),
    facts: Mapping[str, str] | None = None,
    title: str = "gradscope: over training",
) -> Report:
    """Lay out the statistics of one or several checkpoints as a page.

    trend: the checkpoints' statistics, concatenated, with a column `step` and, if known, `other_step`: whether the
    rollouts were sampled by a different checkpoint; such steps are drawn hollow and named in a warning; `too_few`:
    `Supply.too_few` of the step, "" if it has prompts enough. links: text and file, relative to this page, of each
    checkpoint's own page.
    """
    steps = sorted(trend["step"].unique().tolist())
    which = f"{counted(len(steps), 'checkpoint')}, steps {steps[0]} to {steps[-1]}"
    which = which if steps[1:] else f"1 checkpoint, step {steps[0]}"
    labels = [label for label in dict.fromkeys(trend["interval"].fillna("")) if label not in ("", "all")]
    sheets = Sheets(gather(PARTS.values(), "LABELS"))
    followed = follow(trend, labels)
    sheets.keep("followed", followed)
    drawn = sheets.figure(
        "trend_drawn",
        lambda: plot_trend(followed),
        f"Headline numbers at {which}; bands: 95 % over each checkpoint's prompts, cut off where an index in bits "
        "falls far; hollow: rollouts of another step; crosses: bounds allow almost everything, or there are too few "
        "prompts or tokens for any.",
        again=redraw(plot_trend, csv("followed")),
    )
    foreign = sorted(trend.loc[trend["other_step"], "step"].unique().tolist()) if "other_step" in trend else []
    at = f"step{'s' if len(foreign) > 1 else ''} {', '.join(map(str, foreign))}"
    warnings = [f"The rollouts at {at} were sampled by a different checkpoint: drawn hollow."] if foreign else []
    few = _too_few(trend)
    told = trend.drop(columns=["n", "too_few"], errors="ignore")
    numbers = sheets.table("trend", told, "Every number at every checkpoint.", folded=True)
    sheets.keep("trend", trend)
    sections = (
        Section("trend", "Over training", (drawn, *define(_definitions()))),
        Section("checkpoints", "Each checkpoint", (Links(tuple(links)),)),
        Section("numbers", "All numbers", (numbers,)),
    )
    page = Page(
        title=title,
        subtitle=which,
        findings=(*_few_words(few), *_follow(trend, labels[0])),
        sections=sections if links else sections[::2],
        facts=dict(facts or {}),
        notes=tuple(map(as_sentence, notes)),
        warnings=tuple(warnings),
        next=_next(few, trend, labels[0]),
    )
    return Report(page, sheets.tables)


def follow(trend: pd.DataFrame, labels: Sequence[str]) -> pd.DataFrame:
    """Return the rows of the statistics that parts follow, with their panel's title, in the order of the parts."""
    found = []
    for (statistic, metric), (title, _, *place) in gather(PARTS.values(), "FOLLOWED").items():
        interval = "all" if place == ["all"] else labels[place[0] if place else 0]
        same = (trend["statistic"] == statistic) & (trend["metric"] == metric) & (trend["interval"] == interval)
        rule = 0.5 if place == ["all"] else 0.0
        found.append(trend[same].assign(title=title, rule=rule))
    return drop_vacuous(pd.concat(found, ignore_index=True))


def _sentences() -> dict[tuple[str, str], str]:
    """Return statistic and metric → subject of the sentence on the first interval."""
    return {key: words for key, (_, words, *_) in gather(PARTS.values(), "FOLLOWED").items() if words}


def _definitions() -> dict[str, str]:
    """Return the definitions of the parts that are followed."""
    return gather([part for part in PARTS.values() if hasattr(part, "FOLLOWED")], "DEFINITIONS")


def _too_few(trend: pd.DataFrame) -> dict[int, str]:
    """Map each step with too few prompts to its headline."""
    if "too_few" not in trend:
        return {}
    told = trend.drop_duplicates("step").sort_values("step")
    return {int(step): words for step, words in zip(told["step"], told["too_few"], strict=True) if words}


def _few_words(few: Mapping[int, str]) -> list[Finding]:
    if not few:
        return []
    at = f"step{'s' if len(few) > 1 else ''} {', '.join(map(str, few))}"
    each = " ".join(f"Step {step}{words.removeprefix(TOO_FEW)}" for step, words in few.items())
    return [Finding(f"{TOO_FEW} at {at}.", each)]


def _next(few: Mapping[int, str], trend: pd.DataFrame, label: str) -> tuple[str, ...]:
    """Return what to do: which steps have too few prompts, and where to look; never empty."""
    told = [f"Step {step}: {words[:1].lower()}{words[1:]}" for step, words in few.items()]
    changed = [largest or ends for ends, largest in trend_changes(trend, label)] if trend["step"].nunique() > 1 else []
    clear = [change for change in changed if change.verdict in (Verdict.MORE, Verdict.LESS)]
    if clear:
        subject = _sentences()[clear[0].statistic, clear[0].metric].format(name_interval(label))
        subject = subject[:1].lower() + subject[1:]
        told.append(f"Open the pages of steps {clear[0].first.name} and {clear[0].last.name}: {subject} changed there.")
    if told:
        return tuple(told)
    if any(change.verdict is Verdict.UNDECIDED for change in changed):
        return ("Nothing: no followed number changed detectably from one checkpoint to the next.",)
    return ("Diagnose more checkpoints, or more prompts of each: no change could be judged.",)


@dataclass(frozen=True)
class Change:
    """Change of a number between two checkpoints."""

    statistic: str
    metric: str
    first: pd.Series
    """Row at the earlier checkpoint, named by the step."""
    last: pd.Series
    verdict: Verdict
    """MORE: it rose; LESS: it fell; UNDECIDED; UNKNOWN: bounds are missing."""


def trend_changes(trend: pd.DataFrame, label: str) -> list[tuple[Change, Change | None]]:
    """Return each followed number's change from the first to the last checkpoint, and its largest change from one
    checkpoint to the next.

    The latter is None for fewer than three checkpoints. A verdict requires that the 95 % bounds lie apart,
    since the rollouts differ.
    """
    ends, found = {trend["step"].min(), trend["step"].max()}, []
    for statistic, metric in _sentences():
        same = (trend["statistic"] == statistic) & (trend["metric"] == metric) & (trend["interval"] == label)
        rows = trend[same & trend["value"].notna()].set_index("step").sort_index()
        if not ends <= {*rows.index}:
            continue

        def change(one: int, other: int, rows: pd.DataFrame = rows) -> Change:
            first, last = rows.iloc[one], rows.iloc[other]
            return Change(str(first["statistic"]), str(first["metric"]), first, last, _judge(first, last))

        largest = None
        if len(rows) > 2:
            place = int(np.argmax(np.abs(np.diff(rows["value"]))))
            largest = change(place, place + 1)
        found.append((change(0, -1), largest))
    return found


def _judge(first: pd.Series, last: pd.Series) -> Verdict:
    """Judge a change by the 95 % bounds of both."""
    if np.isnan(first["lower"]) or np.isnan(last["lower"]):
        return Verdict.UNKNOWN
    return judge(last, first, write=times if last["unit"] == "bits" else percent)


SAID = {
    Verdict.MORE: "rose",
    Verdict.LESS: "fell",
    Verdict.UNDECIDED: "shows no detectable change",
    Verdict.UNKNOWN: "was not judged",
}


def _follow(trend: pd.DataFrame, label: str) -> list[Finding]:
    """Return a finding per followed number: first and last value and largest change; of one checkpoint, its value."""
    found = []
    for ends, largest in trend_changes(trend, label):
        words = _sentences()[ends.statistic, ends.metric].format(name_interval(label))
        if ends.first.name == ends.last.name:
            if not np.isnan(ends.first["lower"]):
                found.append(Finding(f"{words}: {_tell(ends.first)}."))
            continue
        if ends.verdict is Verdict.UNKNOWN:
            lacking = " and ".join(f"step {row.name}" for row in (ends.first, ends.last) if np.isnan(row["lower"]))
            found.append(Finding(f"{words} {SAID[ends.verdict]}: it has no bounds at {lacking}."))
            continue
        detail = ""
        if largest is not None and largest.verdict is not Verdict.UNKNOWN:
            change = f"{_tell_both(largest)}; it {SAID[largest.verdict]}"
            detail = f"Largest change from one checkpoint to the next: {change}."
        found.append(Finding(f"{words} {SAID[ends.verdict]}: {_tell_both(ends)}.", detail))
    return found


def _tell_both(change: Change) -> str:
    return f"{_tell(change.first)}, {_tell(change.last)}"


def _tell(row: pd.Series) -> str:
    write = times_words if row["unit"] == "bits" else share_words
    return f"{write(row)} at step {row.name}"
