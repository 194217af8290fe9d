"""Which tokens are measured where not all are: drawn within each probability interval, with known probabilities.

A token has a size q > 0 and a random number u of its own, uniform on [0, 1); those with the smallest u / q of each
interval are measured, as many as are asked for. So a larger sample holds every smaller one. Given all other tokens'
numbers, a token is in the sample exactly if u < q·τ, where τ is the smallest u / q that was not taken: its sampling
probability is p = min(1, q·τ), and Σ y / p over the sample estimates Σ y over all tokens without bias, whatever y is
(Horvitz and Thompson; for this rule Duffield, Lund and Thorup, J. ACM 54(6), 2007, and Ohlsson, J. Off. Stat. 14, 1998,
who calls it sequential Poisson sampling). It stays so where the sample ends because time is up, for the time that a
sample takes does not depend on the order in which its tokens were drawn.

Statistics take this sum times Σ p over all / number measured, which is 1 on average: as many are measured as was
fixed, and τ cancels. With equal sizes that is the plain mean of the measured tokens times the number of all.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float, Int

Design = Literal["proportional", "stratified"]

SAMPLING_PROBABILITY = "sampling_probability"
"""Column of the token table of a sample."""
EQUAL_PART = 0.25
"""Share of a token's size that is the same for its whole interval, a lower bound on its chance over equal chances."""


class TokenSample:
    """A sample of the tokens that can grow. intervals: each token's interval, an index below `num_intervals`."""

    def __init__(
        self,
        intervals: Int[np.ndarray, " n"],
        num_intervals: int,
        sizes: Float[np.ndarray, " n"],
        generator: np.random.Generator,
    ) -> None:
        ranks, self._sizes = generator.random(len(intervals)) / sizes, sizes
        members = [np.flatnonzero(intervals == interval) for interval in range(num_intervals)]
        self._members = [own[np.argsort(ranks[own], kind="stable")] for own in members]
        self._ranks = ranks

    @property
    def largest(self) -> int:
        """Number of tokens in the largest interval."""
        return max(map(len, self._members))

    def take(self, each: int) -> Bool[np.ndarray, " n"]:
        """Return the mask of a sample of `each` per interval, or of all tokens in an interval with fewer."""
        taken = np.zeros(len(self._ranks), dtype=bool)
        for own in self._members:
            taken[own[:each]] = True
        return taken

    def probabilities(self, each: int) -> Float[np.ndarray, " n"]:
        """Return every token's chance p in that sample; each / tokens of the interval if sizes are equal."""
        out = np.ones(len(self._ranks))
        for own in self._members:
            if each < len(own):
                sizes = self._sizes[own]
                equal = (sizes == sizes[0]).all()
                out[own] = each / len(own) if equal else np.minimum(1.0, sizes * self._ranks[own[each]])
        return out


def token_sizes(
    design: Design,
    intervals: Int[np.ndarray, " n"],
    logit_grad_norm: Float[np.ndarray, " n"],
    weight: Float[np.ndarray, " n"],
) -> Float[np.ndarray, " n"]:
    """Return the size q of each token, with mean 1 in each interval; all 1 if "stratified".

    "proportional": EQUAL_PART, and the rest half by |w|·‖e − π‖, which Σ‖w·g‖² asks for, and half by ‖e − π‖, which
    mean norms ask for; all of it by ‖e − π‖ in an interval where no weight is known, or one is not.
    """
    sizes = np.ones(len(intervals))
    if design == "stratified":
        return sizes
    for interval in np.unique(intervals):
        own = intervals == interval
        norms, weights = logit_grad_norm[own].astype(np.float64), np.abs(weight[own].astype(np.float64))
        proxies = [part / part.mean() for part in (norms, weights * norms) if part.mean() > 0]
        if proxies:
            sizes[own] = EQUAL_PART + (1 - EQUAL_PART) * np.mean(proxies, axis=0)
    return sizes


def sampling_probabilities(table: pd.DataFrame) -> Float[np.ndarray, " n"] | None:
    """Return each token's chance to be measured, [K]; None if chances were equal within each interval."""
    return table[SAMPLING_PROBABILITY].to_numpy(np.float64) if SAMPLING_PROBABILITY in table else None


def sampling_weights(table: pd.DataFrame) -> Float[np.ndarray, " n"]:
    """Return 1 / p, the number of tokens each one counts for in means and fits; 1 if the table has no chances."""
    probabilities = sampling_probabilities(table)
    return np.ones(len(table)) if probabilities is None else 1.0 / probabilities


def stands_for(table: pd.DataFrame, measured: Bool[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    """Return how many tokens each measured one counts for, so that sums over any choice of tokens are unbiased.

    That is tokens / measured tokens of its interval or, where these had chances p of their own, Σp over the interval /
    measured tokens / p.
    """
    probabilities, interval = sampling_probabilities(table), table["interval"].to_numpy(np.int64)
    expected = np.bincount(interval, probabilities).astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):  # an interval without tokens, or none measured
        counts = (expected / np.bincount(interval, measured, minlength=len(expected)))[interval]
    return counts if probabilities is None else counts / probabilities


def weighted_quantiles(
    values: Float[np.ndarray, " n"], weights: Float[np.ndarray, " n"], levels: Float[np.ndarray, " q"]
) -> Float[np.ndarray, " q"]:
    """Return weighted quantiles; with equal weights, those of `np.quantile`.

    Between two values it is linear in the weight that lies below their middles.

    >>> weighted_quantiles(np.array([3.0, 1.0, 2.0]), np.array([1.0, 1.0, 2.0]), np.array([0.0, 0.5, 1.0])).tolist()
    [1.0, 2.0, 3.0]
    """
    if len(values) == 0:
        return np.full(np.shape(levels), np.nan)
    if (weights == weights[0]).all():
        return np.quantile(values, levels)
    order = np.argsort(values, kind="stable")
    values, weights = values[order], weights[order]
    middles = np.cumsum(weights) - weights / 2
    places = (middles - middles[0]) / (middles[-1] - middles[0])
    return np.interp(levels, places, values)
