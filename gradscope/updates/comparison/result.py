"""A comparison of weightings, and the settings that affect its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd

from gradscope.errors import InputError
from gradscope.intervals import EDGES, interval_labels
from gradscope.objective import PAPER, LossSettings
from gradscope.resampling import Supply
from gradscope.rollouts import Note
from gradscope.runs import counted
from gradscope.updates.comparison.passes import Passes
from gradscope.updates.step_settings import StepSettings


def in_words(update: str) -> str:
    """Return what a sentence calls the update that others are compared with."""
    return "GRPO" if update == "grpo" else update


@dataclass(frozen=True, kw_only=True)
class ComparisonChoices:
    """Settings of a comparison that are flags of `gradscope compare`, too."""

    take_steps: bool = False
    """Also take each weighting's real optimizer step and undo it; with the saved optimizer, or else SGD. Otherwise only
    weightings of two steps take them, if there is a saved optimizer."""
    aggregation: Literal["token-mean", "sequence"] = "token-mean"
    """How losses are averaged: over all tokens, or over responses after averaging each response's tokens."""


@dataclass(frozen=True, kw_only=True)
class ComparisonSettings(ComparisonChoices):
    """Everything that affects a comparison's numbers, apart from the policy, the batch and the weightings."""

    loss: LossSettings = PAPER
    """The loss whose update others are compared with. Its KL part is ignored, since no weighting changes it."""
    edges: Sequence[int | float] = EDGES
    """Edges of the intervals of π, as in the table."""
    step: StepSettings | None = None
    """Settings of real steps; None: those of the saved optimizer, or else the paper's SGD."""
    seed: int = 0
    confidence: float = 0.95
    resamples: int = 1000

    def check(self) -> None:
        """Raise InputError for settings that do not allow a comparison."""
        interval_labels(self.edges)
        if self.loss.reweight_alpha is not None:
            raise InputError(
                f"reweight_alpha is {self.loss.reweight_alpha}; plain GRPO has none, name reweight among the weightings"
            )
        if self.take_steps and self.aggregation != "token-mean":
            raise InputError(f"real steps use the mean over tokens, but aggregation is {self.aggregation}")


@dataclass(frozen=True, repr=False, eq=False)
class Comparison:
    """Effects of each weighting on one batch."""

    table: pd.DataFrame
    """A row per weighting and optimizer step. `method`; `step`: "all"; "low" and "high" for the steps of a two-step
    weighting; "both" for its two real steps together; `same_as`: the earlier row with the same weights (up to rounding)
    and therefore the same numbers, or "". Each number has columns NAME_lower and NAME_upper; NAME_difference is the
    difference to the update compared with, in the first row.

    norm_ratio: ‖U‖ over plain's, U being the summed gradient; cosine: of U and plain's; cosine_from_energies: what the
    tokens' energies alone would make of it, Σ r·e/√(Σ e·Σ r²·e) with plain's energies e = (w‖g‖)² and the ratios r of
    the weights to plain's, which is the cosine if token gradients are orthogonal (estimated as energy_share is, where
    norms are of a sample). signal_to_noise: for one prompt (see `IntervalGradients`), with its difference. right_sgd,
    right_adamw: among tokens that have an advantage and move, the share whose log π moves in its direction, to first
    order. right_step: the same after real steps (AdamW with momentum and decay), and step_cosine: the cosine of the two
    displacements; only in rows whose steps were taken.
    entropy_change: first-order change of the mean entropy of all tokens, in nats, by one step on the weighting's own
    gradient, with its difference; momentum and decay, which no weighting changes, are omitted, and v̂ is plain's.
    effective_share: (Σ|w|‖g‖)²/Σw²‖g‖² over the number of tokens, the fraction of tokens that carry the update;
    effective_share_adamw: the same in the optimizer's metric, if the table has norms in it. zero_share: fraction of
    tokens of weight 0. gain: first-order gain in expected reward on prompts that the weighting's own AdamW step has not
    seen (`gains_on_unseen_prompts`), with gain_difference."""
    by_interval: pd.DataFrame
    """A row per weighting, step and interval of π: energy_share, of Σ w²‖g‖², with energy_share_difference;
    energy_share_adamw, if the table has norms in that metric; gradient_share, ⟨U_a, U⟩/‖U‖², which sums to 1 and has no
    bounds (they would require U_a itself)."""
    weights: pd.DataFrame
    """w_t of each token under each weighting: response, position, then a column METHOD or METHOD.STEP, named as the
    user named the weighting."""
    labels: tuple[str, ...]
    num_prompts: int
    num_informative_prompts: int
    """Prompts with a nonzero advantage, or weight of a loss without advantages."""
    notes: tuple[Note, ...]
    passes: Passes
    """The underlying inner products and changes along the sums, and how they were computed."""
    aggregation: str = "token-mean"
    step: StepSettings | None = None
    """Settings of the real steps; None: no step was taken."""
    supply: Supply | None = None
    """The prompts that were compared and those that there are; None: these are all."""

    @property
    def plain(self) -> str:
        """The update that others are compared with, in words."""
        return in_words(self.table["method"].iloc[0])

    @property
    def too_few(self) -> str:
        """The headline where too few prompts have unequal rewards (`Supply.too_few`); else ""."""
        return (self.supply or Supply(self.num_informative_prompts, self.num_prompts)).too_few

    def statistics(self) -> pd.DataFrame:
        """Return the table in long form, a row per weighting, step and number: method, step, same_as, statistic (the
        number's column), value, lower, upper (NaN without bounds)."""
        table, keys = self.table.reset_index(drop=True), ["method", "step", "same_as"]
        parts = []
        for name in table.columns.difference(keys, sort=False):
            if not name.endswith(("_lower", "_upper")):
                bounds = {end: table.get(f"{name}_{end}", np.nan) for end in ("lower", "upper")}
                parts.append(table[keys].assign(statistic=name, value=table[name], **bounds))
        long = pd.concat(parts).sort_index(kind="stable")  # a weighting's numbers together
        return long.dropna(subset="value").reset_index(drop=True)

    def __repr__(self) -> str:
        title = f"Comparison of {self.table['method'].nunique()} weightings on {counted(self.num_prompts, 'prompt')}"
        return "\n".join(filter(None, (title, self.too_few, self._numbers().to_string(na_rep="–"))))

    def _repr_html_(self) -> str:
        title = f"<b>Comparison</b> on {counted(self.num_prompts, 'prompt')}"
        few = f"<p>{self.too_few}</p>" if self.too_few else ""
        return f"<p>{title}</p>{few}{self._numbers().to_html(na_rep='–')}"

    def _numbers(self) -> pd.DataFrame:
        names = ["norm_ratio", "cosine", "cosine_from_energies", "signal_to_noise", "right_sgd", "right_adamw"]
        names += ["effective_share"]
        shown = self.table.set_index(["method", "step"])
        return shown[["same_as", *(name for name in names if name in shown)]].round(3)
