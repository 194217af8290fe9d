"""Tests of Prop. 4.2 on a policy's real tokens: the bounds at the logits, a theorem, and the power of 1−π below."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from gradscope.errors import checked
from gradscope.gradients import LAYER, LOGITS
from gradscope.resampling import Seed
from gradscope.runs import counted
from gradscope.theory.closed_form import logit_grad_bounds, rounding_tolerance
from gradscope.theory.gains import FLOOR, check_envelopes, decompose_variance, fit_powers, layer_gains, require_columns


@dataclass(frozen=True)
class LogitBounds:
    """How many tokens obey the bounds at the logits."""

    num_tokens: int
    violations: int
    """Tokens outside the bounds by more than rounding, or NaN."""
    tolerance: float
    """Largest relative slack allowed for rounding."""

    @property
    def held(self) -> bool:
        return self.violations == 0

    def __str__(self) -> str:
        return (
            f"logit bounds hold to rounding for {self.num_tokens - self.violations:,} of {self.num_tokens:,} tokens, "
            f"with 1−π uncancelled (largest relative slack allowed: {self.tolerance:.0e})"
        )


def check_logit_bounds(
    norms: Float[Tensor, "*tokens"], log_one_minus_prob: Float[Tensor, "*tokens"], vocab_size: int
) -> LogitBounds:
    """Compare ‖e − π‖ of each token with √(N/(N−1))·(1−π) and √2·(1−π) (Prop. 4.2), to `rounding_tolerance`.

    >>> check_logit_bounds(torch.tensor([0.6, 0.9]), torch.tensor([0.5, 0.5]).log(), vocab_size=8).violations
    1
    """
    slack = rounding_tolerance(log_one_minus_prob)
    lower, upper = logit_grad_bounds(log_one_minus_prob, vocab_size)
    inside = (norms >= lower * (1 - slack)) & (norms <= upper * (1 + slack))  # False for NaN
    return LogitBounds(norms.numel(), int((~inside).sum()), float(slack.max()) if slack.numel() else 0.0)


@dataclass(frozen=True)
class TheoryReport:
    """What a token table says about Prop. 4.2; print it, or show it in Jupyter."""

    logit_bounds: LogitBounds
    powers: pd.DataFrame
    """`gains.fit_powers`."""
    gains: pd.DataFrame
    """`gains.layer_gains`."""
    variance: pd.DataFrame
    """`gains.decompose_variance`."""
    envelopes: pd.DataFrame
    """`gains.check_envelopes`."""
    floor: float
    """Powers and variance are over tokens with 1−π above this."""

    def __str__(self) -> str:
        return "\n".join([str(self.logit_bounds), *self._powers()])

    def _repr_html_(self) -> str:
        tables = {name: getattr(self, name) for name in ("powers", "gains", "variance", "envelopes")}
        html = [f"<h4>{n}</h4>{t.to_html(index=False, float_format=_digits)}" for n, t in tables.items()]
        return f"<pre>{self}</pre>" + "".join(html)

    def _powers(self) -> list[str]:
        """Report the power, which is an empirical question below the head."""
        columns = ["quantity", "slope", "slope_lower", "slope_upper", "r2", "tokens"]
        shown = self.powers[columns].merge(
            self.gains[["quantity", "slope"]], "left", "quantity", suffixes=("", "_of_gain")
        )
        shown = shown.merge(self.variance[["quantity", "carried"]], "left", "quantity")
        shown = shown.merge(self.envelopes[["quantity", "linear_slack", "sqrt_slack"]], "left", "quantity")
        above = {law: int(self.envelopes[f"{law}_exceeded"].sum()) for law in ("linear", "sqrt")}
        few = self.powers.loc[self.powers["slope"].isna(), "quantity"]
        prompts = int(self.powers["prompts"].max())
        lines = [
            f"Power of 1−π that norms follow on 1−π > {self.floor:g}: theory 1, √ law ½ "
            f"({counted(prompts, 'prompt')}).",
            "   lower, upper: 95 %. The logits' slope is near 1 by algebra and shows nothing. carried: share of",
            "   Var(log norm) that 1−π carries (above 1: the gain works against it). slack: times that the envelopes",
            "   C·√2·(1−π) and C·√2·√(1−π), with C from the tokens with π ≤ ½, exceed the median token with π > ½.",
            *_lines(shown),
            f"   norms above these envelopes, over all rows: {above['linear']:,} and {above['sqrt']:,}"
            f" of {int(self.envelopes['tokens'].sum()):,}",
        ]
        return [*lines, *([f"   too few tokens to fit: {', '.join(few)}"] if len(few) else [])]


@checked
def theory_report(
    table: pd.DataFrame, *, vocab_size: int, seed: Seed = 0, floor: float = FLOOR, resamples: int = 1000
) -> TheoryReport:
    """Report what a token table says about Prop. 4.2.

    table: the columns of `measure` and `group`, the id of the token's prompt.
    """
    require_columns(table, [LOGITS, "log_one_minus_prob"])
    norms, log_rest = (torch.tensor(table[c].to_numpy(np.float32)) for c in (LOGITS, "log_one_minus_prob"))
    return TheoryReport(
        logit_bounds=check_logit_bounds(norms, log_rest, vocab_size),
        powers=fit_powers(table, seed=seed, floor=floor, resamples=resamples),
        gains=layer_gains(table, floor=floor),
        variance=decompose_variance(table, seed=seed, floor=floor, resamples=resamples),
        envelopes=check_envelopes(table),
        floor=floor,
    )


def _digits(value: float) -> str:
    return f"{value:.3g}"


def _lines(table: pd.DataFrame) -> list[str]:
    return [f"   {line}" for line in table.to_string(index=False, float_format=_digits).splitlines()]


def measured_cones(theory: TheoryReport, layers: list[str]) -> pd.DataFrame:
    """Return the measured gains of these layers, as cones for Fig. 2."""
    gains = theory.gains[theory.gains["quantity"].isin(layers)]
    return pd.DataFrame(
        {
            "layer": gains["quantity"].str.removeprefix(LAYER),
            "lower_gain": gains["min"],
            "upper_gain": gains["max"],
            "kind": "measured",
        }
    )
