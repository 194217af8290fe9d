"""Lay out a running training as one page: shares by step, and the largest tokens as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd

from gradscope.diagnosis.findings import Finding as Told
from gradscope.diagnosis.page.contents import Report
from gradscope.diagnosis.page.page import Definition, Finding, Page, Paragraph, Section
from gradscope.diagnosis.page.sheets import Sheets, csv, redraw
from gradscope.plots import plot_steps


def make_live_report(
    steps: pd.DataFrame, largest: pd.DataFrame, found: Told | None, *, facts: Mapping[str, str] | None = None
) -> Report:
    """Lay out a training's steps as a page.

    steps: a row per step and interval: step, interval (its label), token_share, logit_grad_share, clipped_share,
    masked_share, mismatch, entropy; NaN: unknown. largest: tokens of recent steps. found: verdict on these steps.
    """
    sheets = Sheets()
    first, last = steps["step"].min(), steps["step"].max()
    caption, again = f"Steps {first} to {last}, by interval of π_old.", redraw(plot_steps, csv("numbers"))
    drawn = sheets.figure("steps", lambda: plot_steps(steps), caption, again=again)
    shown: Sequence[str] = ("step", "token", "before", "prob", "share", "slope", "position")
    tokens = sheets.table(
        "largest",
        largest,
        "Tokens of recent steps with the largest |w|·‖e − π‖, by their share of their step's sum; before: the "
        "preceding text; slope: ∂loss/∂ log π, negative if the loss makes the token more probable.",
        [name for name in shown if name in largest],
    )
    numbers = sheets.table("numbers", steps, "Every number of every step.", folded=True)
    meaning = (
        "|w|·‖e − π‖ is the norm of a token's gradient at its own logits: w is its weight in the trainer's "
        "own loss, e − π the gradient of its log π. It excludes the network's contribution between logits and "
        "parameters, and cancellation between tokens."
    )
    exact = Paragraph(
        "This page has no exact shares of the gradient over all parameters: GradScopeCallback logs them beside it "
        "(gradscope/grad_share), and `gradscope diagnose` shows a checkpoint's."
    )
    sections = (
        Section("steps", "Over the steps", (drawn, exact, Definition("gradient at the logits", meaning))),
        Section("largest", "The largest tokens", (tokens,)),
        Section("numbers", "All numbers", (numbers,)),
    )
    said = () if found is None else (Finding(found.statement, found.detail, found.tone),)
    page = Page(
        title="gradscope: while it trains",
        subtitle=f"steps {first} to {last}",
        findings=said,
        sections=sections if len(largest) else sections[::2],
        facts=dict(facts or {}),
        next=("For exact shares: gradscope diagnose CHECKPOINT --rollouts ROLLOUTS --out DIR.",),
    )
    return Report(page, sheets.tables)
