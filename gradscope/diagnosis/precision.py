"""Estimate how much of a number's bounds is due to the sample of tokens, and how a larger one would narrow them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from jaxtyping import Float

from gradscope.diagnosis.format import percent
from gradscope.diagnosis.rows import pick_row
from gradscope.diagnosis.shares import sum_by_prompt, token_shares
from gradscope.diagnosis.terms import weighted_norms
from gradscope.diagnosis.update import has_gradient, supply_of
from gradscope.gradients import LOGITS, PARAMETERS, TableMeasurement, sampling_probabilities
from gradscope.intervals import interval_labels, summarize_cells
from gradscope.resampling import Resampling, Seed
from gradscope.runs import digits

NORMAL = 1.959964
"""Half the width of a 95 % interval, in standard errors of a normal distribution."""
FEWEST = 8
"""Fewest measured tokens of a sampled interval for an estimate of their spread."""
NEARLY_ALL = 0.9
"""Fraction of the variance above which the prompts' own part cannot be distinguished from 0."""
LITTLE = 0.1
"""Fraction of the variance below which a larger sample is not worthwhile."""


@dataclass(frozen=True)
class SamplingError:
    """Sampling's effect on a table's headline number: the lowest interval's share of Σ‖w·g‖², or else its mean ‖g‖."""

    quantity: str
    """Description, including the interval."""
    value: float
    lower: float
    upper: float
    """95 %, over prompts and tokens; NaN with one prompt."""
    standard_error: float
    """Standard error due to the sample alone: over other tokens of the same responses."""
    part: float
    """Share of the variance behind lower and upper due to the sample; the rest is the prompts'. NaN with one prompt."""
    measured: int
    """Number of measured tokens."""
    tokens: int

    def width(self, times: float) -> float:
        """Return the factor on the interval's width with `times` as many measured tokens; infinity: all of them."""
        return float(np.sqrt(1 - self.part + self.part * self._shrink(times)))

    def _shrink(self, times: float) -> float:
        """Return the variance of a sample `times` as large, relative to this one's; 0 with all tokens."""
        fraction = self.measured / self.tokens
        return max(0.0, (1 / (times * fraction) - 1) / (1 / fraction - 1))

    def in_words(self) -> str:
        """Describe the error due to the sample."""
        said = f"{self.quantity}: {digits(self.value, 3)}"
        if not np.isfinite(self.lower):
            error = f" ± {digits(self.standard_error)}, a standard error," if np.isfinite(self.standard_error) else ""
            return f"{said}{error} of these prompts; there are too few for bounds."
        return f"{said} [{digits(self.lower, 3)}, {digits(self.upper, 3)}]. {self.of_bounds('these bounds')}"

    def of_bounds(self, which: str) -> str:
        """Say how much of the bounds named `which` is due to the sample, and how more tokens would narrow them."""
        if not np.isfinite(self.part):
            return f"Too few tokens were measured to say how much more of them would narrow {which}."
        if self.part > NEARLY_ALL:  # an estimate: the prompts' own part need not be 0
            return f"Nearly all of the variance behind {which} comes from sampling tokens: more would narrow them."
        part = f"{percent(self.part)} %"
        said = f"{part} of the variance behind {which} comes from sampling tokens, the rest from prompts"
        if self.part < LITTLE:
            return f"{said}: more tokens would hardly narrow them."
        names = {4.0: "4 times as many tokens", np.inf: "all tokens"}
        bought = []
        for times in (4.0, np.inf) if 4 * self.measured < self.tokens else (np.inf,):
            bought.append(f"{self.width(times):.2f} times as wide with {names[times]}")
        return f"{said}. They would be {' and '.join(bought)}."


def sampling_error(
    table: pd.DataFrame,
    labels: Sequence[str],
    *,
    shares: pd.DataFrame | None = None,
    seed: Seed = 0,
    resamples: int = 1000,
) -> SamplingError | None:
    """Compute the sampling error of the lowest measured interval; None if all or none of its tokens were measured."""
    probabilities, measured = sampling_probabilities(table), table[PARAMETERS].notna().to_numpy()
    if probabilities is None or not measured.any():
        return None
    interval = table["interval"].to_numpy(np.int64)
    own, size = int(interval[measured].min()), len(labels)
    counts = {"measured": int(measured.sum()), "tokens": len(table)}
    if not has_gradient(table):
        norms = table[PARAMETERS].to_numpy(np.float64)
        args = (norms, interval, table["group"], size)
        proxies = table[LOGITS].to_numpy(np.float64)
        drawn = {"resampling": Resampling(seed, resamples=resamples), "probabilities": probabilities, "sizes": proxies}
        row = summarize_cells(*args, **drawn).iloc[own]
        found = row[["value", "lower", "upper"]].to_numpy(np.float64)
        tokens = np.bincount(interval, minlength=size)[own]
        error = np.sqrt(design_variances(norms, proxies, probabilities, interval, size)[own]) / tokens
        return SamplingError(
            f"mean ‖g‖ of tokens with π in {labels[own]}", *found, error, _part(error, *found[1:]), **counts
        )
    sums = sum_by_prompt(table, size)
    rows = token_shares(sums, labels, seed=seed, resamples=resamples) if shares is None else shares
    row = pick_row(rows, "squared_share", "raw", labels[own])
    found = row[["value", "lower", "upper"]].to_numpy(np.float64)
    proxies = (table["weight"] * table[LOGITS]).to_numpy(np.float64) ** 2
    variances = design_variances(weighted_norms(table) ** 2, proxies, probabilities, interval, size)
    totals = np.nan_to_num(sums.totals(np.ones((1, len(sums.tokens))))[0])
    slopes = np.where(np.arange(size) == own, 1 - found[0], -found[0]) / totals.sum()
    error = float(np.sqrt((slopes**2 * variances).sum()))
    quantity = f"share of Σ‖w·g‖² of tokens with π in {labels[own]}"
    return SamplingError(quantity, *found, error, _part(error, *found[1:]), **counts)


def judge_sample(measurement: TableMeasurement, table: pd.DataFrame) -> str | None:
    """Describe the sampling error of a measurement; None if every token was measured, the headline if too few prompts.
    """
    few = supply_of(table, measurement.whole, measurement.verdict_minutes).too_few
    if few and has_gradient(table):
        return few
    rng = np.random.default_rng(measurement.settings.seed)
    error = sampling_error(table, interval_labels(measurement.edges), seed=rng)
    return None if error is None else error.in_words()


def design_variances(
    values: Float[np.ndarray, " n"],
    proxies: Float[np.ndarray, " n"],
    probabilities: Float[np.ndarray, " n"],
    interval: np.ndarray,
    num_intervals: int,
) -> Float[np.ndarray, " A"]:
    """Return the sampling variance of each interval's ratio estimate of Σ values; values: NaN where not measured.

    Hájek's estimator for samples of fixed size, n/(n − 1) Σ (1 − p)(r/p − B)² over measured tokens, with r the residual
    value − proxy · Σ value / Σ proxy (estimated) and B the mean of r/p weighted by 1 − p. NaN if fewer than FEWEST
    measured tokens of an interval were drawn at random.
    """
    out = np.zeros(num_intervals)
    for a in range(num_intervals):
        known = (interval == a) & ~np.isnan(values)
        own = known & (probabilities < 1)
        missing = int(((interval == a) & np.isnan(values)).sum())
        if not missing:
            continue
        left, n = 1 - probabilities[own], int(own.sum())
        if n < FEWEST:
            out[a] = np.nan
            continue
        sums = ((part[known] / probabilities[known]).sum() for part in (values, proxies))
        ratio = np.divide(*sums)
        scaled = (values[own] - ratio * proxies[own]) / probabilities[own]
        middle = (left * scaled).sum() / left.sum()
        out[a] = n / (n - 1) * (left * (scaled - middle) ** 2).sum()
    return out


def _part(error: float, lower: float, upper: float) -> float:
    """Return the share of the variance behind the bounds that this standard error explains, at most 1."""
    whole = (upper - lower) / (2 * NORMAL)
    return float(np.minimum(1.0, (error / whole) ** 2)) if whole > 0 else np.nan
