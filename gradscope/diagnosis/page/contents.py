"""A diagnosis, or what a dump alone says, as a page with its tables, and both as files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd

from gradscope.diagnosis import plots as plot_diagnosis
from gradscope.diagnosis.page.page import Finding, Page, Paragraph, Section
from gradscope.diagnosis.page.render import write_page
from gradscope.diagnosis.page.sections import KEYS, Sheets, make_sections
from gradscope.diagnosis.page.viewer import Viewer, prompt_texts
from gradscope.diagnosis.result import Diagnosis
from gradscope.diagnosis.tokens import add_weighted_norms
from gradscope.diagnosis.words import findings
from gradscope.policy import Policy
from gradscope.rollouts import TokenBatch
from gradscope.runs import write_text

PAGE = "report.html"
NO_VERDICT = (
    "No verdict: this is from the dump alone. It is exact at the logits and assumes that gradients below them go as "
    "1 − π, which nobody measured here."
)


@dataclass(frozen=True)
class Report:
    """A page, and the tables that travel with it."""

    page: Page
    tables: dict[str, pd.DataFrame] = field(default_factory=dict)
    """By file name, relative to the page."""


def make_report(
    diagnosis: Diagnosis,
    policy: Policy,
    batch: TokenBatch,
    *,
    title: str = "gradscope diagnosis",
    facts: Mapping[str, str] | None = None,
    notes: Sequence[str] = (),
) -> Report:
    """The page of one checkpoint's diagnosis.

    policy, batch: those that were diagnosed; the viewer shows their prompts. facts: how the results were made; notes:
    what has to be known beside what the diagnosis says itself, such as how the rollouts were read.
    """
    sheets = Sheets()
    d = diagnosis
    page = Page(
        title=title,
        subtitle=f"{len(d.table):,} response tokens, {d.num_responses:,} responses to {d.num_prompts:,} prompts",
        findings=tuple(Finding(*sentence) for sentence in findings(d)),
        sections=make_sections(d, policy, sheets),
        viewer=_make_viewer(d, policy, batch),
        facts=dict(facts or {}),
        notes=tuple(map(as_sentence, (*notes, *d.notes))),
    )
    return Report(page, sheets.tables)


def make_logit_report(
    table: pd.DataFrame,
    shares: pd.DataFrame,
    *,
    title: str = "gradscope: a dump alone",
    facts: Mapping[str, str] | None = None,
    notes: Sequence[str] = (),
) -> Report:
    """The page of the cheap mode; table, shares: of `logit_table` and `logit_shares`. No verdict."""
    sheets = Sheets()
    blocks = (
        Paragraph(
            "For every token 1 − π ≤ ‖e − π‖ ≤ √2·(1 − π), whatever the vocabulary (Prop. 4.2). With the weights "
            "of the loss (Eq. 2) this bounds each interval's share of the sums below. For what the parameters feel, "
            "measure with the policy at hand: gradscope diagnose MODEL --rollouts FILE --out DIR."
        ),
        sheets.figure(
            "logit_shares_drawn",
            lambda: plot_diagnosis.plot_logit_shares(shares),
            "Share of each interval of π in the tokens and in Σ|w|, and the range that its share of Σ|w|·‖e − π‖ "
            "and of Σ(w·‖e − π‖)² can have by the bounds (thick); thin lines reach over the 95 % interval of redrawn "
            "prompts.",
        ),
        sheets.table("logit_shares", shares, "All shares, also among the tokens of each sign of the advantage."),
    )
    subtitle = f"{len(table):,} response tokens, {table['response'].nunique():,} responses"
    sections = (Section("logits", "Bounds at the logits", blocks),)
    notes = tuple(map(as_sentence, notes))
    finding = Finding(NO_VERDICT, f"{subtitle}, read in the precision of the dump.", "warn")
    return Report(Page(title, subtitle, (finding,), sections, None, dict(facts or {}), notes), sheets.tables)


def write_report(folder: str | Path, report: Report) -> Path:
    """Write the tables, then report.html, into the folder, each beside and then renamed; its path."""
    folder = Path(folder)
    for name, frame in report.tables.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_text(folder / name, frame.to_csv(index=False))
    return write_page(folder / PAGE, report.page)


def as_sentence(note: str) -> str:
    """What the command line prints after "note:", with a capital, unless it begins with a name, and a full stop."""
    first = note.split(" ", 1)[0]
    start = note[:1].upper() + note[1:] if first.isalpha() and first.islower() else note
    return start if start.endswith((".", "!", "?")) else f"{start}."


def _make_viewer(d: Diagnosis, policy: Policy, batch: TokenBatch) -> Viewer:
    """The tokens that were diagnosed, with their movement where a step was taken."""
    table = add_weighted_norms(d.table)
    if d.movement is not None:
        moved = d.movement[[*KEYS, "delta_logprob.all"]].rename(columns={"delta_logprob.all": "delta_logprob"})
        table = table.merge(moved, on=KEYS, how="left", validate="one_to_one")
    prompts = None if policy.tokenizer is None else prompt_texts(batch, policy.tokenizer)
    rewards = None if batch.rewards is None else batch.rewards.tolist()
    return Viewer(table, prompts=prompts, rewards=rewards)
