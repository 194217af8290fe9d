"""Settings of a diagnosis."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Literal, TypedDict

from gradscope.errors import InputError
from gradscope.intervals import EDGES, interval_labels
from gradscope.objective import PAPER, LossSettings
from gradscope.updates import StepSettings

Number = int | float

LARGEST_SEED = 2**57
"""torch seeds have 63 bits."""
LARGE = 100_000_000
"""Size from which weightings are compared only on request, since this takes more passes than all the rest."""


@dataclass(frozen=True, kw_only=True)
class DiagnosisChoices:
    """Settings of a diagnosis that are flags of `gradscope diagnose`, too."""

    actual_step: bool = True
    """Take one real step with the whole batch, measure its effect, and undo it."""
    influence_tokens: int | None = 16_000
    """Tokens (of whole prompts) whose change in the step is split by source; none: skip this."""
    compare: bool | None = None
    """Compare token weightings; none: only for policies below 100 M parameters."""


@dataclass(frozen=True, kw_only=True)
class DiagnosisSettings(DiagnosisChoices):
    """Settings that change a diagnosis's numbers."""

    loss: LossSettings = PAPER
    """The objective; a given table must have been measured with it."""
    edges: tuple[Number, ...] = EDGES
    """Edges of the intervals of π; a given table must have the same."""
    tokens_per_interval: int | Literal["auto", "enough"] | None = "enough"
    """Tokens to measure per interval if no table is given; see `MeasureSettings`."""
    classes: int = 4
    """Number of classes by position and by entropy, each with the same number of tokens."""
    top: int = 20
    """Number of tokens to list by ‖w·g‖ and by movement against their advantage."""
    gradient_memory: int | None = None
    """Bytes for gradients. Gradients of prompts and intervals are computed whole or as sketches (see
    `TokenJacobian.gram`) to fit; those of predicted and real steps use scratch files if they need more. None: a sixth
    of the free memory."""
    gradient_way: Literal["whole", "sketches"] | None = None
    """How to compute the gradients of prompts and intervals, regardless of cost; None: what fits."""
    minutes: Number | None = None
    """Time limit for the whole diagnosis, including the table if none is given. Prompts are subsampled to fit, those
    with summed gradients further; the sums, AdamW's metric, steps and the comparison are left out, with a note, if
    they would take longer. None: no limit."""
    step: StepSettings | None = None
    """Optimizer of all steps; None: the optimizer state's, else the paper's SGD."""
    micro_batch_size: int = 8
    """Maximum number of responses in a forward pass for gradients; affects only rounding."""
    resamples: int = 1000
    """Number of resamples of every bootstrap."""
    seed: int = 0
    """Seed for all random numbers."""
    parts: tuple[str | ModuleType, ...] = ()
    """Your own questions, beside those of `diagnosis.parts`: modules, or "FILE.py:NAME"."""

    def check(self) -> None:
        """Raise InputError for settings that make no diagnosis possible."""
        self.loss.check()
        interval_labels(self.edges)
        if self.step is not None:
            self.step.check()
        if self.minutes is not None and not 0 < self.minutes < float("inf"):
            raise InputError(f"minutes is {self.minutes}; give a positive number, or None for no limit")
        for name in ("classes", "top", "gradient_memory", "influence_tokens", "micro_batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name} is {value}; give 1 or more")
        if self.resamples < 1 or not 0 <= self.seed < LARGEST_SEED:
            raise InputError(f"resamples is {self.resamples} and seed {self.seed}; give 1 or more, and 0 to 2**57 − 1")


class DiagnosisKeywords(TypedDict, total=False):
    """Fields of `DiagnosisSettings` as keywords of `diagnose`; weighting: that of `loss`."""

    weighting: str | None
    loss: LossSettings
    edges: tuple[Number, ...]
    tokens_per_interval: int | Literal["auto", "enough"] | None
    classes: int
    top: int
    gradient_memory: int | None
    gradient_way: Literal["whole", "sketches"] | None
    minutes: Number | None
    influence_tokens: int | None
    actual_step: bool
    compare: bool | None
    step: StepSettings | None
    micro_batch_size: int
    resamples: int
    seed: int
    parts: tuple[str | ModuleType, ...]
