"""Sampling of tokens within each probability interval, with known sampling probabilities.

Each token has a size q > 0 and a random number u, uniform on [0, 1). In each interval, the tokens with the smallest
u / q are measured, so a larger sample contains every smaller one. Given the numbers of all other tokens, a token is in
the sample if and only if u < q·τ, where τ is the smallest u / q not taken. Its sampling probability is therefore
p = min(1, q·τ), and Σ y / p over the sample is an unbiased estimate of Σ y over all tokens, for any y (Horvitz and
Thompson; for this rule Duffield, Lund and Thorup, J. ACM 54(6), 2007, and Ohlsson, J. Off. Stat. 14, 1998, who calls it
sequential Poisson sampling).

Statistics use the ratio estimator (Cochran, Sampling Techniques, ch. 6): Σ y / p over the sample · Σ x over all tokens
/ (Σ x / p over the sample), with x a proxy of y that is known for every token: ‖e − π‖ for ‖g‖. Its variance is that of
y − x Σy/Σx, which a good proxy makes small; its bias is of order 1 / sample size. With x and p constant it is the plain
mean over the measured tokens times the number of all tokens.
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
"""Part of a token's size that is equal for its whole interval; bounds its chance below, relative to equal chances."""


class TokenSample:
    """A sample of tokens that can grow. intervals: each token's interval index, below `num_intervals`."""

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
        """Return every token's sampling probability p; with equal sizes, each / number of tokens in the interval."""
        out = np.ones(len(self._ranks))
        for own in self._members:
            if each < len(own):
                sizes = self._sizes[own]
                equal = (sizes == sizes[0]).all()
                out[own] = each / len(own) if equal else np.minimum(1.0, sizes * self._ranks[own[each]])
        return out


class ThresholdSample:
    """A sample of each prompt's tokens by itself: those with u < q·τ, where u is uniform on [0, 1).

    Sizes q and thresholds τ are fixed by the tokens of a few prompts, so the sampling probability of a token is
    p = min(1, q·τ) whatever other tokens there are (Poisson sampling). τ lets through `each` tokens per interval of π
    of a prompt like these, on average; a prompt with larger sizes gets more. A larger sample contains every smaller
    one.
    """

    def __init__(self, scouts: pd.DataFrame, prompts: int, num_intervals: int, design: Design, seed: int) -> None:
        """scouts: `interval`, `logit_grad_norm` and `weight` of all tokens of so many prompts."""
        self._design, self._seed = design, seed
        interval, proxies = scouts["interval"].to_numpy(np.int64), _proxies(scouts)
        counts = np.bincount(interval, minlength=num_intervals)
        means = np.stack([np.bincount(interval, own, num_intervals) / np.maximum(1, counts) for own in proxies])
        self._means = np.where(counts > 0, means, np.stack([own.mean() for own in proxies])[:, None])
        self._tokens = np.maximum(1, counts) / prompts

    def probabilities(self, tokens: pd.DataFrame, each: int | None) -> Float[np.ndarray, " n"]:
        """Return the sampling probability of each token for `each` per interval and prompt; None: all are measured."""
        if each is None:
            return np.ones(len(tokens))
        interval = tokens["interval"].to_numpy(np.int64)
        return np.minimum(1.0, self._sizes(tokens, interval) * each / self._tokens[interval])

    def take(self, tokens: pd.DataFrame, prompt: int, each: int | None) -> Bool[np.ndarray, " n"]:
        """Return the mask of the tokens to measure. tokens: all of a prompt; prompt: its own number, for the seed."""
        drawn = np.random.default_rng([self._seed, 2, prompt]).random(len(tokens))
        return drawn < self.probabilities(tokens, each)

    def _sizes(self, tokens: pd.DataFrame, interval: Int[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
        """Return the size q of each token, with mean 1 over the scouts of each interval."""
        if self._design == "stratified":
            return np.ones(len(tokens))
        means = self._means[:, interval]
        known = means > 0
        parts = np.divide(_proxies(tokens), means, out=np.zeros_like(means), where=known)
        mean = parts.sum(0) / np.maximum(1, known.sum(0))
        return np.where(known.any(0), EQUAL_PART + (1 - EQUAL_PART) * mean, 1.0)


def _proxies(tokens: pd.DataFrame) -> Float[np.ndarray, "2 n"]:
    """Return ‖e − π‖ and |w|·‖e − π‖, 0 where the weight is unknown."""
    norms = tokens["logit_grad_norm"].to_numpy(np.float64)
    return np.stack([norms, np.nan_to_num(np.abs(tokens["weight"].to_numpy(np.float64))) * norms])


def token_sizes(
    design: Design,
    intervals: Int[np.ndarray, " n"],
    logit_grad_norm: Float[np.ndarray, " n"],
    weight: Float[np.ndarray, " n"],
) -> Float[np.ndarray, " n"]:
    """Return the size q of each token, with mean 1 in each interval; all 1 if "stratified".

    "proportional": EQUAL_PART is constant; half of the rest is proportional to |w|·‖e − π‖, which suits Σ‖w·g‖², and
    half to ‖e − π‖, which suits mean norms. Intervals with unknown weights use ‖e − π‖ only.
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
    """Return each token's sampling probability [K]; None if these were equal within each interval."""
    return table[SAMPLING_PROBABILITY].to_numpy(np.float64) if SAMPLING_PROBABILITY in table else None


def sampling_weights(table: pd.DataFrame) -> Float[np.ndarray, " n"]:
    """Return 1 / p, each token's weight in means and fits; 1 if the table has no sampling probabilities."""
    probabilities = sampling_probabilities(table)
    return np.ones(len(table)) if probabilities is None else 1.0 / probabilities


def stands_for(
    table: pd.DataFrame, measured: Bool[np.ndarray, " n"], proxies: Float[np.ndarray, " n"]
) -> Float[np.ndarray, " n"]:
    """Return the factor of each measured token in sums over tokens, the ratio estimator's for its interval.

    proxies: of the values to be summed, for all tokens. The factor is 1 / p in an interval whose proxies are all 0, and
    NaN where only those of the measured tokens are.
    """
    interval, weights = table["interval"].to_numpy(np.int64), sampling_weights(table)
    wholes = np.bincount(interval, proxies)
    sampled = np.bincount(interval, np.where(measured, proxies * weights, 0.0))
    ratios = np.divide(wholes, sampled, out=np.where(wholes > 0, np.nan, 1.0), where=sampled > 0)
    return weights * ratios[interval]


def weighted_quantiles(
    values: Float[np.ndarray, " n"], weights: Float[np.ndarray, " n"], levels: Float[np.ndarray, " q"]
) -> Float[np.ndarray, " q"]:
    """Return weighted quantiles; with equal weights, those of `np.quantile`.

    Interpolates linearly in the cumulative weight at the values' midpoints.

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
