"""Lay out a diagnosis as a page with its tables, and write it to files."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from gradscope.diagnosis.as_json import FILE, to_json
from gradscope.diagnosis.findings import Finding as Told
from gradscope.diagnosis.format import as_sentence, bits_words, number_words, share_words
from gradscope.diagnosis.notes import by_weight
from gradscope.diagnosis.page.first_screen import decide, make_lead, make_tiles
from gradscope.diagnosis.page.page import KEYS, Block, Figure, Finding, Page, Section, Table
from gradscope.diagnosis.page.render import render, write_page
from gradscope.diagnosis.page.sheets import DATA, Sheets
from gradscope.diagnosis.page.viewer import Viewer, prompt_texts, viewer_data
from gradscope.diagnosis.parts import gather
from gradscope.diagnosis.result import TITLE, Diagnosis
from gradscope.diagnosis.terms import add_weighted_norms
from gradscope.diagnosis.wording import words_for
from gradscope.errors import checked
from gradscope.gradients import PARAMETERS
from gradscope.intervals import name_interval
from gradscope.plots import METRICS, label_of
from gradscope.policy import Policy
from gradscope.rollouts import TokenBatch
from gradscope.runs import counted, write_text

PAGE = "report.html"


@dataclass(frozen=True)
class Report:
    """Page with its tables."""

    page: Page
    tables: dict[str, pd.DataFrame] = field(default_factory=dict)
    """By file name, relative to the page."""
    data: dict[str, Any] | None = None
    """The contents of diagnosis.json; None: there is none."""

    def to_html(self, path: str | Path) -> Path:
        """Write the page alone, without links to its tables; return its path."""

        def alone(block: Block | None) -> Block | None:
            block = replace(block, code="") if isinstance(block, Figure) else block
            return replace(block, csv=None) if isinstance(block, Figure | Table) else block

        sections = tuple(replace(s, blocks=tuple(map(alone, s.blocks))) for s in self.page.sections)
        return write_page(Path(path), replace(self.page, sections=sections, lead=alone(self.page.lead)))


@checked
def make_report(
    diagnosis: Diagnosis,
    policy: Policy,
    batch: TokenBatch,
    *,
    title: str = TITLE,
    facts: Mapping[str, str] | None = None,
    notes: Sequence[str] = (),
) -> Report:
    """Lay out one checkpoint's diagnosis as a page.

    policy, batch: as diagnosed; the viewer shows their prompts. facts: how the results were made. notes: added to the
    diagnosis's own, such as how the rollouts were read.
    """
    d, sheets = diagnosis, Sheets(gather(diagnosis.parts.values(), "LABELS"))
    sections = make_sections(d, sheets)
    moved = d.frames.get("movement")
    shown = d.table.drop(columns="advantage") if d.scope.settings.loss.is_whole else d.table
    reader = viewer(shown, batch=batch, tokenizer=policy.tokenizer, movement=moved).page.viewer
    linked = [token[0] for s in sections for block in s.blocks if isinstance(block, Table) for token in block.tokens]
    reader = replace(reader, needed=[*linked, *([] if reader.first is None else [reader.first])])
    decision = decide(d, brief=True)
    page = Page(
        title=title,
        subtitle=describe_rollouts(d, batch),
        findings=tuple(filter(None, (_as_evidence(finding, decision) for finding in d.findings))),
        sections=sections,
        viewer=reader,
        facts=dict(facts or {}),
        notes=tuple(as_sentence(note) for note in by_weight((*notes, *d.notes)) if note not in d.warnings),
        warnings=tuple(map(as_sentence, d.warnings)),
        decision=decision,
        tiles=make_tiles(d),
        lead=make_lead(d, sheets),
        next=d.advice,
        words=words_for(d.scope.settings.loss),
    )
    return Report(page, sheets.tables, to_json(d))


def make_sections(d: Diagnosis, sheets: Sheets) -> tuple[Section, ...]:
    """Make a section for each part that shows something, in their order, and one of all numbers; folded ones last."""
    made = []
    for name, part in d.parts.items():
        if name in d.rows and hasattr(part, "show") and (blocks := part.show(d, sheets)):
            made.append(Section(name, part.TITLE, tuple(blocks), getattr(part, "FOLDED", False)))
    made.append(Section("numbers", "All numbers", (_list_numbers(d, sheets),), True))
    return tuple(sorted(made, key=lambda section: section.folded))


def _list_numbers(d: Diagnosis, sheets: Sheets) -> Table:
    caption = "All headline numbers, with the number of tokens behind each."
    sheets.tables[f"{DATA}/statistics.csv"] = d.statistics
    write = {"share": share_words, "bits": bits_words}
    told = [write.get(row["unit"], partial(number_words, significant=3))(row) for _, row in d.statistics.iterrows()]
    shown = {
        "statistic": d.statistics["statistic"].map(sheets.label_of),
        "metric": d.statistics["metric"].map(METRICS),
        label_of("interval"): [name_interval(x) if "," in x else x for x in d.statistics["interval"]],
        "value": told,
        "tokens": d.statistics["n"],
        "unit": d.statistics["unit"],
    }
    return Table(pd.DataFrame(shown), caption, folded=True, csv=f"{DATA}/statistics.csv")


def _as_evidence(finding: Told, decision: Sequence[str]) -> Finding | None:
    """Return a finding for the page; for one that the first screen states, only its basis."""
    if any(said and said in words for said in (finding.statement, finding.brief) for words in decision):
        return Finding(finding.detail) if finding.detail else None
    return Finding(finding.brief or finding.statement, finding.detail, finding.tone)


@checked
def write_report(folder: str | Path, report: Report) -> Path:
    """Write the tables, diagnosis.json and report.html into the folder, each atomically; return the page's path."""
    folder = Path(folder)
    for name, frame in report.tables.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_text(folder / name, frame.to_csv(index=False))
    if report.data is not None:
        write_text(folder / FILE, json.dumps(report.data, indent=1, ensure_ascii=False) + "\n")
    return write_page(folder / PAGE, report.page)


@dataclass(frozen=True, repr=False)
class TokenViewer:
    """The page's token viewer by itself, shown in a notebook or written as a self-contained page."""

    page: Page

    def to_html(self, path: str | Path) -> Path:
        """Write the page; return its path."""
        return write_page(Path(path), self.page)

    def __repr__(self) -> str:
        table = self.page.viewer.table
        responses = counted(table["response"].nunique(), "response")
        return f"TokenViewer({counted(len(table), 'token')} of {responses}; to_html(path) writes it)"

    def _repr_html_(self) -> str:
        source = html.escape(render(self.page), quote=True)
        return f'<iframe srcdoc="{source}" title="Token viewer" style="width: 100%; height: 44rem; border: 0"></iframe>'


@checked
def viewer(
    table: pd.DataFrame,
    *,
    batch: TokenBatch | None = None,
    tokenizer: Any = None,
    movement: pd.DataFrame | None = None,
    title: str = "Token by token",
) -> TokenViewer:
    """Show a token table response by response, each token shaded by its numbers; a notebook displays it.

    table: result of `measure`. batch: the rollouts, for rewards and, with the policy's tokenizer, prompts. movement:
    `movement_table` of one step. Raises InputError if the table has no column to shade by.
    """
    shown = table if "weight" not in table or PARAMETERS not in table else add_weighted_norms(table)
    if movement is not None:
        moved = movement[[*KEYS, "delta_logprob.all"]].rename(columns={"delta_logprob.all": "delta_logprob"})
        shown = shown.merge(moved, on=KEYS, how="left", validate="one_to_one")
    prompts = None if batch is None or tokenizer is None else prompt_texts(batch, tokenizer)
    rewards = None if batch is None or batch.rewards is None else batch.rewards.tolist()
    parts = {} if batch is None else {name: own.tolist() for name, own in (batch.reward_parts or {}).items()}
    first = None
    if "squared_share" in shown and (energy := shown.groupby("response")["squared_share"].sum()).max() > 0:
        first = int(energy.idxmax())
    shade = "weighted_norm"
    if "gradient_share" in shown:
        percents = {"gradient_percent": 100 * shown["gradient_share"], "own_percent": 100 * shown["own_share"]}
        shown, shade = shown.assign(**percents), "gradient_percent"
        first = int(shown["gradient_share"].groupby(shown["response"]).sum().abs().idxmax())
    made = Viewer(shown, prompts=prompts, rewards=rewards, reward_parts=parts, shade=shade, first=first)
    viewer_data(made)  # raise errors now, not when it is shown
    return TokenViewer(Page(title, viewer=made))


def describe_rollouts(d: Diagnosis, batch: TokenBatch) -> str:
    """Describe the tokens, responses and prompts in a line."""
    temperatures = ", ".join(f"{value:g}" for value in batch.temperature.unique().tolist())
    measured, scope = int(d.table[PARAMETERS].notna().sum()), d.scope
    sampled = f" ({measured:,} measured, drawn with known chances)" if measured < len(d.table) else ""
    responses = f"{counted(scope.supply.responses, 'response')} to {scope.prompts}"
    told = f"{counted(len(d.table), 'token')}{sampled} of {responses}"
    if scope.supply.prompts < scope.of_prompts:
        told = f"looked at {scope.supply.prompts:,} of {scope.of_prompts:,} prompts, drawn at random, {measured:,} of "
        told += f"{counted(scope.of_tokens, 'token')} exactly; {responses}"
    return f"{told}; temperature {temperatures}"
