"""The result of a diagnosis: each part's numbers, what they say, and what is missing."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any

import pandas as pd

from gradscope.diagnosis.findings import WARNINGS, Findings
from gradscope.diagnosis.rows import Rows, join_rows, pick_row
from gradscope.diagnosis.settings import DiagnosisSettings
from gradscope.errors import InputError
from gradscope.resampling import Supply
from gradscope.rollouts import Note
from gradscope.runs import counted
from gradscope.updates import SGD, StepSettings

if TYPE_CHECKING:
    from gradscope.diagnosis.measured import Measured
    from gradscope.gradients import SumsPlan

TITLE = "gradscope diagnosis"
"""Title of a diagnosis's page."""


@dataclass(frozen=True)
class Scope:
    """What a diagnosis looked at."""

    labels: tuple[str, ...]
    """Labels of the intervals of π."""
    supply: Supply
    """The prompts behind all statements about gradients; `supply.too_few` is the headline if there are too few."""
    table: pd.DataFrame | None = None
    """The token table; None: unknown, as of a training that goes on."""
    of_tokens: int = 0
    """Tokens in the whole batch."""
    settings: DiagnosisSettings = field(default_factory=DiagnosisSettings)
    step: StepSettings = SGD
    """Optimizer settings of the predicted and real steps."""
    parameters: str = "all parameters"
    """The parameters that ‖g‖ and G_a cover, in words."""
    own_responses: int | None = None
    """Responses that the checkpoint itself sampled; None: as far as is known, all of them."""
    summed: int | None = None
    """Prompts with summed gradients; None: there are none."""

    @property
    def low(self) -> str:
        """Label of the lowest interval."""
        return self.labels[0]

    @property
    def prompts(self) -> str:
        """The number of prompts in words, such as "12 prompts (8 of them with an advantage)"."""
        served, prompts = self.supply.informative, self.supply.prompts
        of = "" if served == prompts else f" ({served:,} of them with an advantage)"
        return f"{counted(prompts, 'prompt')}{of}"

    @property
    def all_summed(self) -> bool:
        """Whether no prompt that was looked at is missing from the summed gradients."""
        return self.summed in (None, self.supply.prompts)

    @property
    def summed_prompts(self) -> str:
        """The prompts of the summed gradients in words."""
        return self.prompts if self.all_summed else f"{self.summed:,} of the {counted(self.supply.prompts, 'prompt')}"

    @property
    def of_summed(self) -> str:
        """Name the prompts of the summed gradients in a caption, if others were left out of them."""
        return "" if self.all_summed else f" (of {self.summed:,} of {self.supply.prompts:,} prompts)"

    @property
    def of_prompts(self) -> int:
        """Prompts in the whole batch."""
        return self.supply.prompts if self.supply.of_prompts is None else self.supply.of_prompts


@dataclass(frozen=True, repr=False, eq=False)
class Diagnosis:
    """The diagnosis of one checkpoint on one batch. A part that was not made is not in `rows`; `left_out` says why."""

    rows: Mapping[str, Rows]
    """Each part's numbers, by its name in `diagnosis.parts`."""
    scope: Scope
    notes: tuple[Note, ...] = ()
    """Sentences about what is missing, sampled or approximate, each with a `kind`."""
    left_out: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Products and parts that were asked for but are missing, and why."""
    findings: Findings = field(default_factory=Findings)
    """The numbers in sentences, e.g. found.findings["dominance_raw"].verdict."""
    advice: tuple[str, ...] = ()
    """What to do next, most urgent first."""
    parts: Mapping[str, ModuleType] = field(default_factory=lambda: MappingProxyType({}))
    """The parts, in order."""
    measured: Measured | None = None
    """What was measured, with policy and batch; None if the diagnosis was assembled by hand."""
    report: Callable[..., Any] | None = None
    """`make_report` for this diagnosis, its policy and batch; None if the diagnosis was assembled by hand."""

    @cached_property
    def statistics(self) -> pd.DataFrame:
        """All headline numbers, one per row; see `rows.COLUMNS` and `rows.SHORTAGE`."""
        return join_rows([own.rows for own in self.rows.values()])

    @cached_property
    def frames(self) -> Mapping[str, pd.DataFrame]:
        """The parts' further tables, by name."""
        return {name: frame for own in self.rows.values() for name, frame in own.frames.items()}

    @property
    def table(self) -> pd.DataFrame:
        """The token table."""
        return self.scope.table

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels of the intervals of π."""
        return self.scope.labels

    @property
    def sums_plan(self) -> SumsPlan | None:
        """How the summed gradients were computed; None if they were not."""
        sums = None if self.measured is None else self.measured.made.get("sums")
        return None if sums is None else sums.raw.plan

    @property
    def warnings(self) -> tuple[Note, ...]:
        """Notes that may change the verdict itself."""
        return tuple(note for note in self.notes if getattr(note, "kind", "") in WARNINGS)

    def pick(self, statistic: str, metric: str = "none", interval: str = "") -> pd.Series | None:
        """Return a row of `statistics`, or None if it was not computed."""
        return pick_row(self.statistics, statistic, metric, interval)

    def plot(self, name: str) -> Any:
        """Return a figure of the page by its name, that of its CSV: `found.plot("update_groups")`.

        Raises InputError, with all names, if the page has none of this name.
        """
        from gradscope.diagnosis.page.page import Figure
        from gradscope.diagnosis.page.sheets import Sheets

        drawn = {}
        for part_name, part in self.parts.items():
            if part_name in self.rows and hasattr(part, "show"):
                blocks = part.show(self, Sheets())
                drawn |= {Path(block.csv).stem: block.drawing for block in blocks if isinstance(block, Figure)}
        if name not in drawn:
            raise InputError(f"the page has no figure {name!r}; it has {', '.join(sorted(drawn)) or 'none'}")
        return drawn[name]

    def to_html(
        self, path: str | Path, *, title: str = TITLE, facts: Mapping[str, str] | None = None, notes: Sequence[str] = ()
    ) -> Path:
        """Write the page as one self-contained file and return its path; other arguments as in `make_report`."""
        if self.report is None:
            raise InputError("this diagnosis was assembled by hand; use make_report(found, policy, batch)")
        return self.report(title=title, facts=facts, notes=notes).to_html(path)

    def __repr__(self) -> str:
        return "\n".join([self._title(), repr(self.findings), *(f"Next: {words}" for words in self.advice)])

    def _repr_html_(self) -> str:
        todo = "".join(f"<p><b>Next</b> {html.escape(words)}</p>" for words in self.advice)
        return f"<p><b>{self._title()}</b></p>{self.findings._repr_html_()}{todo}"

    def _title(self) -> str:
        supply = self.scope.supply
        return (
            f"Diagnosis of {counted(len(self.table), 'token')} of {counted(supply.responses, 'response')} to "
            f"{counted(supply.prompts, 'prompt')}; {len(self.statistics)} statistics, "
            f"{counted(len(self.notes), 'note')}"
        )
