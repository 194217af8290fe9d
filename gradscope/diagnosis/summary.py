"""Summarize a measurement: the printed summary, and the paper's first figures."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from gradscope.diagnosis.format import norm_words, says_nothing
from gradscope.gradients import LOGITS
from gradscope.intervals import interval_labels
from gradscope.resampling import Supply
from gradscope.theory import TheoryReport

if TYPE_CHECKING:
    from gradscope.gradients import IntervalGradients

LEGEND = """mean_norm: mean unweighted ‖g‖ per token, with a 95 % interval over prompts; squared_share: of Σ‖w g‖²;
gradient_norm: ‖G_a‖/‖G‖; gradient_share: ⟨G_a, G⟩/‖G‖²; half_cosine: of G_a between two halves of the prompts"""
"""Meaning of the columns of Summary.intervals."""
WEIGHTED = ("squared_share", "gradient_norm", "gradient_share", "gradient_share_error", "half_cosine")
"""Columns of Summary.intervals that say nothing where prompts are too few."""
ENOUGH = 30
"""Minimum number of tokens to report a fitted power."""


@dataclass(frozen=True)
class Summary:
    """The numbers behind a measurement's summary."""

    intervals: pd.DataFrame
    """One row per interval: its shares of the tokens, the summed gradient and Σ‖w g‖², and the mean token norm."""
    gradients: IntervalGradients | None
    """None if the rollouts have neither advantages nor rewards."""
    theory: TheoryReport | None
    """None if too few tokens were measured."""
    parameters: str = "all parameters"
    """The parameters that norms and sums cover, in words."""
    of_prompts: int | None = None
    """Prompts in the whole batch; None: the sums cover all."""
    supply: Supply | None = None
    """The prompts that were looked at; None: unknown."""

    def __str__(self) -> str:
        bounds = ["norm_lower", "norm_upper"]
        useless = self.intervals[bounds].set_axis(["lower", "upper"], axis=1).apply(says_nothing, axis=1, unit="norm")
        shown = self.intervals.assign(**{name: self.intervals[name].mask(useless) for name in bounds})
        if self._too_few:
            shown = shown[[name for name in shown if name not in WEIGHTED]]
        table = shown.to_string(index=False, float_format="{:.3g}".format, na_rep="–")
        parts = [self.sentences(), f"{table}\n{LEGEND.partition(';')[0] if self._too_few else LEGEND}"]
        if self.gradients is not None and self.gradients.plan is not None and self.gradients.plan.way != "whole":
            parts.append(f"{self.gradients.plan}.")
        if self.gradients is not None and not self._too_few:
            matrix = self.gradients.cosines.set_axis(interval_labels(), axis=0).set_axis(interval_labels(), axis=1)
            parts += [
                "Cosines between the intervals' summed gradients:",
                matrix.to_string(float_format="{:.2f}".format, na_rep="–"),
            ]
        return "\n\n".join(parts)

    def sentences(self) -> str:
        """Return the findings as sentences."""
        table = self.intervals
        lines = self._norms(table)
        if self._too_few:
            return f"{self._too_few}\n{lines[0]} Norms are over {self.parameters}."
        if self.gradients is not None:
            lines += self._sums(table)
        return "\n".join(lines)

    @property
    def _too_few(self) -> str:
        """The headline where there is a gradient, of too few prompts; else ""."""
        has = self.gradients is not None and bool(_rows(self.intervals, "gradient_share"))
        return self.supply.too_few if has and self.supply is not None else ""

    def theory_words(self) -> str:
        """Report how Prop. 4.2 and powers of 1−π fit these tokens; "" if there is nothing to report."""
        if self.theory is None:
            return ""
        powers = self.theory.powers
        fits = powers[(powers["quantity"] != LOGITS) & (powers["tokens"] >= ENOUGH)]
        fits, words = fits.dropna(subset="slope").sort_values("slope"), []
        if len(fits):
            least, most = _power(fits.iloc[0]), _power(fits.iloc[-1])
            words.append(
                f"Below the logits, norms grow like (1−π)^s with s from {least} to {most} by layer (theory: 1, "
                f"√ law: ½; [95 %]), fitted on the {int(powers['tokens'].max()):,} tokens that are not nearly certain; "
                "Prop. 4.2 bounds norms and does not fix s."
            )
        return "\n\n".join([*words, "Prop. 4.2 on these tokens:", str(self.theory)])

    def _norms(self, table: pd.DataFrame) -> list[str]:
        """Report the norms of single tokens."""
        low, high = table.iloc[0], table.iloc[-1]
        lines = [f"{int(table['measured'].sum()):,} of {int(table['tokens'].sum()):,} response tokens were measured."]
        if np.isfinite(low["mean_norm"]) and high["mean_norm"] > 0:
            ends = {"mean_norm": "value", "norm_lower": "lower", "norm_upper": "upper"}
            ratio = low["mean_norm"] / high["mean_norm"]
            norms = " against ".join(norm_words(row[list(ends)].rename(ends)) for row in (low, high))
            lines.append(
                f"Per token: one with π < ¼ has {ratio:.1f} times the gradient norm of one with π ≥ ¾ on average "
                f"({norms}, {self.parameters}, unweighted)."
            )
        return lines

    def _sums(self, table: pd.DataFrame) -> list[str]:
        """Report the summed gradients, and how far to trust them."""
        owned = _rows(table, "token_share", "gradient_share")
        if not owned:
            return ["Summed: every weight of the loss is 0 (equal rewards in each group, or all clipped): no gradient."]
        each = ", ".join(
            f"{_percent(share)} by {tokens:.1%} of the tokens (π in {name})" for name, tokens, share in owned
        )
        halves = ", ".join(f"{cosine:.2f}" for _, cosine in _rows(table, "half_cosine"))
        summed, whole = self.gradients.num_prompts, self.of_prompts
        whose = "this batch's gradient"
        if whole is not None and summed < whole:
            whose = f"the gradient of {summed:,} of this batch's {whole:,} prompts, drawn at random"
        return [
            f"Summed: of {whose} (⟨G_a, G⟩/‖G‖²), {each}.",
            f"Between two halves of the {self.gradients.num_prompts} prompts, G_a has cosines {halves or '–'}: where "
            "that is near 0, G_a may be mostly noise, and another batch would give another share (one split; "
            "`gradscope diagnose` gives the signal with an interval).",
        ]

    def _repr_html_(self) -> str:
        sentences = escape(self.sentences()).replace("\n", "<br>")
        parts = [f"<p>{sentences}</p>", self.intervals.to_html(index=False, float_format="{:.3g}".format)]
        parts += [part._repr_html_() for part in (self.gradients, self.theory) if part is not None]
        return "".join(parts)


def _power(fit: pd.Series) -> str:
    """Format a power, with its interval if there is one."""
    between = f" [{fit['slope_lower']:.2f}, {fit['slope_upper']:.2f}]" if np.isfinite(fit["slope_lower"]) else ""
    return f"{fit['slope']:.2f}{between}"


def _percent(share: float) -> str:
    """Format a rounded percentage, without a minus sign on zero."""
    return f"{round(share, 2) + 0.0:.0%}"


def _rows(table: pd.DataFrame, *columns: str) -> list[tuple]:
    """Return (interval, values…) of the rows in which none of these columns is NaN."""
    return list(table.dropna(subset=columns)[["interval", *columns]].itertuples(index=False, name=None))
