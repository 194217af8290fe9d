"""Tests of Prop. 4.2 on a policy's real tokens: at the logits, where it is a theorem, and at layers with constants.

The report adds three things to the proposition: the power of 1−π that norms below the logits follow, where lower bounds
are vacuous, and how much wider the products of constants are than the gains of real tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch

from gradscope.errors import InputError, checked
from gradscope.gradients import LAYER, LOGITS
from gradscope.resampling import Seed
from gradscope.runs import counted
from gradscope.theory.closed_form import check_logit_grad_bounds
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


def check_logit_bounds(table: pd.DataFrame, vocab_size: int) -> LogitBounds:
    """Compare every token's `logit_grad_norm` with √(N/(N−1))·(1−π) and √2·(1−π) (Prop. 4.2)."""
    require_columns(table, [LOGITS, "log_one_minus_prob"])
    norms, log_rest = (torch.tensor(table[c].to_numpy(np.float32)) for c in (LOGITS, "log_one_minus_prob"))
    check = check_logit_grad_bounds(norms, log_rest, vocab_size)
    return LogitBounds(check.num_tokens, check.num_below + check.num_above, check.tolerance)


def check_layer_bounds(
    tokens: pd.DataFrame,
    constants: pd.DataFrame,
    vocab_size: int,
    *,
    tiny: float = 1e-12,
    tolerance: float = 1e-4,
) -> pd.DataFrame:
    """Test Eq. 3 with the constants of the tokens' own contexts (`layer_constants`); a row per layer.

    tokens: rows of a token table with a column `context`, the index of the context that the token follows (NaN: none).
    The lower bound is vacuous if ∏c ≤ tiny or unknown, the upper if ∏d is unknown; violations (beyond the relative
    tolerance) are counted among the rest. Columns: layer, product_kind, tokens, lower_vacuous, lower_violated,
    lower_slack, upper_vacuous, upper_violated, upper_slack; a slack is the factor between the median token and the
    bound. Raises InputError if no token has both constants and a measured norm.
    """
    require_columns(tokens, ["context", "log_one_minus_prob"])
    rows = []
    for (layer, kind), part in constants.groupby(["layer", "product_kind"], sort=True):
        name = f"{LAYER}{layer}"
        require_columns(tokens, [name])
        known = tokens[[name, "log_one_minus_prob", "context"]].astype(float).dropna()
        known = known.merge(part[["context", "product_c", "product_d"]], on="context")
        rest, norm = np.exp(known["log_one_minus_prob"]), known[name]
        lower = known["product_c"] * np.sqrt(vocab_size / (vocab_size - 1)) * rest
        upper = known["product_d"] * np.sqrt(2) * rest
        row = {"layer": layer, "product_kind": kind, "tokens": len(known)}
        sides = (
            ("lower", known["product_c"] > tiny, norm >= lower * (1 - tolerance), norm / lower.where(lower > 0)),
            ("upper", np.isfinite(known["product_d"]), norm <= upper * (1 + tolerance), upper / norm.where(norm > 0)),
        )
        for side, meant, obeyed, slack in sides:
            row[f"{side}_vacuous"] = int((~meant).sum())
            row[f"{side}_violated"] = int((meant & ~obeyed).sum())
            row[f"{side}_slack"] = slack[meant].median()
        rows.append(row)
    if not sum(row["tokens"] for row in rows):
        raise InputError(
            "no token has both a measured norm and the constants of its context; measure the tokens whose contexts "
            "layer_constants got, and number them in the column context"
        )
    return pd.DataFrame([row for row in rows if row["tokens"]])


def compare_spreads(gains: pd.DataFrame, constants: pd.DataFrame) -> pd.DataFrame:
    """Compare the ratio ∏d/∏c at single contexts with the gains of real tokens; a row per layer.

    Columns: layer, product_kind, contexts, product_c, product_d, product_ratio and reach_ratio (medians over contexts
    of ∏d/∏c and of the ratio of largest to smallest gain over all tokens that could follow; ∞ if ∏c is 0, NaN if
    unknown everywhere), then gain_min, gain_max, gain_ratio of the tokens that did follow.
    """
    rows = []
    for (layer, kind), part in constants.groupby(["layer", "product_kind"], sort=True):
        measured = gains[gains["quantity"] == f"{LAYER}{layer}"]
        if measured.empty:
            raise InputError(f"the gains have no row of {LAYER}{layer}; give those of the constants' policy")
        c, d = part["product_c"].to_numpy(), part["product_d"].to_numpy()
        with np.errstate(divide="ignore"):
            ratio = pd.Series(d / c).dropna().median()
        row = {"layer": layer, "product_kind": kind, "contexts": part["context"].nunique()}
        row |= {name: part[name].dropna().median() for name in ("product_c", "product_d")}
        row |= {"product_ratio": ratio, "reach_ratio": (part["reach_max"] / part["reach_min"]).median()}
        rows.append(row | {f"gain_{name}": measured[name].iloc[0] for name in ("min", "max", "ratio")})
    return pd.DataFrame(rows)


@dataclass(frozen=True)
class TheoryReport:
    """What a token table and, if given, constants say about Prop. 4.2; print it, or show it in Jupyter."""

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
    rest_ratio: float
    """Ratio of largest to smallest 1−π among the fitted tokens."""
    constants: pd.DataFrame | None = None
    """`layer_constants`; None: not computed."""
    spreads: pd.DataFrame | None = None
    """`compare_spreads`."""
    layer_bounds: pd.DataFrame | None = None
    """`check_layer_bounds`; None if no token in the table names its context."""

    def __str__(self) -> str:
        parts = [[str(self.logit_bounds)], self._powers(), self._head(), self._products()]
        return "\n".join(line for part in parts for line in part)

    def _repr_html_(self) -> str:
        names = ("powers", "gains", "variance", "envelopes", "spreads", "layer_bounds", "constants")
        tables = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        html = [
            f"<h4>{n.replace('_', ' ')}</h4>{t.to_html(index=False, float_format=_digits)}" for n, t in tables.items()
        ]
        return f"<pre>{self}</pre>" + "".join(html)

    def _powers(self) -> list[str]:
        """Caveat 1: below the head, the power is an empirical question."""
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
            f"1. Power of 1−π that norms follow on 1−π > {self.floor:g}: theory 1, √ law ½ "
            f"({counted(prompts, 'prompt')}).",
            "   lower, upper: 95 %. The logits' slope is near 1 by algebra and shows nothing. carried: share of",
            "   Var(log norm) that 1−π carries (above 1: the gain works against it). slack: times that the envelopes",
            "   C·√2·(1−π) and C·√2·√(1−π), with C from the tokens with π ≤ ½, exceed the median token with π > ½.",
            *_lines(shown),
            f"   norms above these envelopes, over all rows: {above['linear']:,} and {above['sqrt']:,}"
            f" of {int(self.envelopes['tokens'].sum()):,}",
        ]
        return [*lines, *([f"   too few tokens to fit: {', '.join(few)}"] if len(few) else [])]

    def _head(self) -> list[str]:
        """Caveat 2: σ_min says nothing at the head."""
        if self.constants is None:
            return [
                "2. The head's and the layers' constants were not computed (gradscope measure --constants N, or",
                "   gradscope.theory.layer_constants)",
            ]
        head = self.constants[self.constants["module"] == "head"]
        vocab, width = (int(head[c].iloc[0]) for c in ("outputs", "inputs"))
        null = (
            f"σ_min(Jᵀ) is 0, for {vocab} logits > {width} dimensions leave a null space"
            if vocab > width
            else f"{vocab} logits ≤ {width} dimensions"
        )
        return [
            f"2. Head: {null};",
            f"   the least of the other singular values is {_range(head['sigma_min'])}. What means something:",
            f"   min over tokens k of ‖Jᵀ(e_k−π)‖/‖e_k−π‖ = {_range(head['c'])}, beside σ_max(J) = {_range(head['d'])}",
            f"   ({counted(len(head), 'context')}, exact, 1/T and soft caps included)",
        ]

    def _products(self) -> list[str]:
        """Caveat 3: the products may swamp 1−π."""
        if self.spreads is None:
            return []
        lines = [
            "3. Spread of the products, ∏d/∏c at a context, beside the exact reach of gains over the vocabulary there",
            f"   and the gains of real tokens, max/min each; 1−π itself spans {self.rest_ratio:.3g}× in the fits",
            *_lines(self.spreads),
            "   certified constants belong to their own context; NaN: not converged; ∏c = 0: σ_min is below rounding",
        ]
        if self.layer_bounds is None:
            return [*lines, "   Eq. 3 was not tested on tokens: the table has no column context"]
        bounds = self.layer_bounds
        sides = []
        for side in ("lower", "upper"):
            meant = int((bounds["tokens"] - bounds[f"{side}_vacuous"]).sum())
            broken, vacuous = (int(bounds[f"{side}_{word}"].sum()) for word in ("violated", "vacuous"))
            slack = f"{_range(bounds[f'{side}_slack'])}× off by the layer" if meant else "nothing to compare"
            sides.append(f"   {side} bound: violated by {broken:,} of {meant:,} ({slack}), vacuous for {vacuous:,}")
        return [*lines, "   Eq. 3 on tokens × layers, with the constants of each token's own context:", *sides]


@checked
def theory_report(
    table: pd.DataFrame,
    constants: pd.DataFrame | None = None,
    *,
    vocab_size: int,
    seed: Seed = 0,
    floor: float = FLOOR,
    resamples: int = 1000,
) -> TheoryReport:
    """Report what a token table says about Prop. 4.2 and, with constants, about Eq. 3.

    table: the columns of `measure` and `group`, the id of the token's prompt; with constants also `context`, the index
    of the context that the token follows, NaN if that has no constants.
    """
    gains = layer_gains(table, floor=floor)
    rest = table["log_one_minus_prob"][table["log_one_minus_prob"] > np.log(floor)].astype(float)
    known = constants is not None and "context" in table and table["context"].notna().any()
    return TheoryReport(
        logit_bounds=check_logit_bounds(table, vocab_size),
        powers=fit_powers(table, seed=seed, floor=floor, resamples=resamples),
        gains=gains,
        variance=decompose_variance(table, seed=seed, floor=floor, resamples=resamples),
        envelopes=check_envelopes(table),
        floor=floor,
        rest_ratio=float(np.exp(rest.max() - rest.min())),
        constants=constants,
        spreads=None if constants is None else compare_spreads(gains, constants),
        layer_bounds=check_layer_bounds(table, constants, vocab_size) if known else None,
    )


def _digits(value: float) -> str:
    return f"{value:.3g}"


def _range(values: pd.Series) -> str:
    low, high = _digits(values.min()), _digits(values.max())
    return low if low == high else f"{low} … {high}"


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
