"""Several checkpoints as one page: how their headline numbers went over training, and a way to each one's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from gradscope.diagnosis import plots as plot_diagnosis
from gradscope.diagnosis.format import bits_words, share_words
from gradscope.diagnosis.glossary import DEFINITIONS
from gradscope.diagnosis.page.contents import Report, as_sentence
from gradscope.diagnosis.page.page import Definition, Finding, Links, Page, Section
from gradscope.diagnosis.page.sections import Sheets
from gradscope.diagnosis.result import VERDICT_PROMPTS
from gradscope.errors import InputError

FOLLOWED = (
    ("dominance_index", "raw", "The dominance index of tokens with π in {}"),
    ("squared_share", "raw", "The share of Σ‖w·g‖² that tokens with π in {} hold"),
    ("gradient_share", "raw", "The share of the summed gradient that tokens with π in {} make"),
    ("token_share", "none", "The share of the tokens with π in {}"),
    ("added_index", "raw", "What the network adds to 1 − π for tokens with π in {}"),
)
"""Statistic, metric and words of the sentences on the first interval."""


def make_trend_report(
    trend: pd.DataFrame,
    *,
    links: Sequence[tuple[str, str]] = (),
    notes: Sequence[str] = (),
    facts: Mapping[str, str] | None = None,
    title: str = "gradscope: over training",
) -> Report:
    """The page of several checkpoints; InputError for one.

    trend: the statistics of each, one below the other, with a column `step`. links: words and file, relative to this
    page, of each checkpoint's own page.
    """
    steps = sorted(trend["step"].unique().tolist())
    if len(steps) < 2:
        raise InputError(f"the trend has {len(steps)} checkpoint; give two or more")
    labels = list(dict.fromkeys(trend.loc[trend["statistic"] == "token_share", "interval"]))
    sheets = Sheets()
    drawn = sheets.figure(
        "trend_drawn",
        lambda: plot_diagnosis.plot_trend(trend, labels),
        f"Headline numbers at {len(steps)} checkpoints, steps {steps[0]} to {steps[-1]}; bands are 95 % over redrawn "
        "prompts, of the rollouts that each checkpoint was diagnosed on.",
    )
    numbers = sheets.table("trend", trend.drop(columns=["n"]), "Every number at every checkpoint.", folded=True)
    terms = ("dominance index", "share of Σ‖w·g‖²", "share of the summed gradient", "signal fraction", "95 % interval")
    sections = (
        Section("trend", "Over training", (drawn, *(Definition(term, DEFINITIONS[term]) for term in terms))),
        Section("checkpoints", "Each checkpoint", (Links(tuple(links)),)),
        Section("numbers", "All numbers", (numbers,)),
    )
    page = Page(
        title=title,
        subtitle=f"{len(steps)} checkpoints, steps {steps[0]} to {steps[-1]}",
        findings=tuple(_follow(trend, labels[0], steps)),
        sections=sections if links else sections[::2],
        facts=dict(facts or {}),
        notes=tuple(map(as_sentence, notes)),
    )
    return Report(page, sheets.tables)


def _follow(trend: pd.DataFrame, label: str, steps: Sequence[int]) -> list[Finding]:
    """A sentence for each number that is known at the first and at the last checkpoint."""
    prompts = trend[(trend["statistic"] == "prompts") & trend["step"].isin([steps[0], steps[-1]])]
    judges, found = bool((prompts["value"] >= VERDICT_PROMPTS).all()), []
    for statistic, metric, words in FOLLOWED:
        same = (trend["statistic"] == statistic) & (trend["metric"] == metric) & (trend["interval"] == label)
        rows = trend[same & trend["value"].notna()].set_index("step")
        if not {steps[0], steps[-1]} <= {*rows.index}:
            continue
        first, last = rows.loc[steps[0]], rows.loc[steps[-1]]
        write = bits_words if first["unit"] == "bits" else share_words
        told = f"{write(first)} at step {steps[0]}, {write(last)} at step {steps[-1]}"
        change = _change(first, last) if judges else "cannot be judged by so few prompts"
        found.append(Finding(f"{words.format(label)} {change}: {told}."))
    return found


def _change(first: pd.Series, last: pd.Series) -> str:
    """What two intervals of 95 % bear: they are of different rollouts."""
    if np.isnan(first["lower"]) or np.isnan(last["lower"]):
        return "is known without intervals"
    if last["lower"] > first["upper"]:
        return "rose"
    if last["upper"] < first["lower"]:
        return "fell"
    return "cannot be told to have changed"
