"""Confidence intervals: clusters (prompts) are redrawn whole, for tokens of one prompt are not independent draws.

One draw of how often each cluster counts serves percentile and centred bootstraps; where nothing is redrawn, intervals
are Student's t over independent rows, or a jackknife that leaves out one part in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from gradscope.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

Evaluate = Callable[[np.ndarray], np.ndarray]
"""How often each cluster is drawn, [draws, clusters], to the statistics, [draws, n]; NaN where a draw has none."""
Seed = int | np.random.Generator | None
"""Of a bootstrap: what `numpy.random.default_rng` takes; None: without intervals."""


def draw_clusters(num_clusters: int, resamples: int, seed: Seed) -> np.ndarray:
    """[resamples, num_clusters]: how often each cluster is among as many drawn with replacement."""
    shares = np.full(num_clusters, 1 / num_clusters)
    return np.random.default_rng(seed).multinomial(num_clusters, shares, size=resamples)


def percentiles(draws: np.ndarray, confidence: float) -> np.ndarray:
    """[2, n]: lower and upper percentiles of each column of [draws, n] over the draws that have a value.

    >>> percentiles(np.array([[1.0, np.nan], [2.0, np.nan], [3.0, np.nan]]), 0.5).tolist()
    [[1.5, nan], [2.5, nan]]
    """
    tail = (1 - confidence) / 2
    bounds = np.full((2, draws.shape[1]), np.nan)
    for number, column in enumerate(draws.T):
        drawn = column[~np.isnan(column)]
        if drawn.size:
            bounds[:, number] = np.quantile(drawn, [tail, 1 - tail])
    return bounds


def bootstrap(
    evaluate: Evaluate,
    num_clusters: int,
    *,
    seed: Seed = 0,
    confidence: float = 0.95,
    resamples: int = 1000,
) -> np.ndarray:
    """[3, n]: n statistics of the sample, and lower and upper percentiles of them over redrawn clusters.

    The bounds are NaN with fewer than two clusters, and with seed None. Raises InputError for no confidence level and
    for no resample.

    >>> heights = np.array([1.0, 2.0, 6.0])
    >>> bootstrap(lambda weights: weights @ heights[:, None] / 3, 3, seed=None).tolist()
    [[3.0], [nan], [nan]]
    """
    if not 0 < confidence < 1 or resamples < 1:
        raise InputError(f"confidence {confidence}, {resamples} resamples; give a level inside (0, 1) and at least one")
    sample = evaluate(np.ones((1, num_clusters)))[0]
    return np.vstack([sample, percentiles(redraw(evaluate, num_clusters, seed, resamples), confidence)])


def redraw(evaluate: Evaluate, num_clusters: int, seed: Seed, resamples: int = 1000) -> np.ndarray:
    """[resamples, n]: the statistics of redrawn clusters; no row with fewer than two clusters, and with seed None."""
    if num_clusters < 2 or seed is None:
        return evaluate(np.ones((1, num_clusters)))[:0]
    return evaluate(draw_clusters(num_clusters, resamples, seed))


def odds_of_largest(draws: np.ndarray) -> np.ndarray:
    """[n]: in which share of the draws, [draws, n], each column is the largest; NaN without a draw that has a value.

    >>> odds_of_largest(np.array([[1.0, 2.0], [3.0, 2.0], [np.nan, 2.0], [np.nan, np.nan]])).round(2).tolist()
    [0.33, 0.67]
    """
    drawn = draws[~np.isnan(draws).all(1)]
    if not len(drawn):
        return np.full(draws.shape[1], np.nan)
    return np.bincount(np.nanargmax(drawn, axis=1), minlength=draws.shape[1]) / len(drawn)


def centred_bootstrap(
    evaluate: Evaluate,
    num_clusters: int,
    *,
    seed: Seed = 0,
    confidence: float = 0.95,
    resamples: int = 1000,
) -> np.ndarray:
    """As `bootstrap`, for statistics that redrawing biases: [3, n], value, lower and upper.

    The bounds are value + (percentile − mean of the draws) · t/z · √(n/(n−1)), with the quantiles t of Student's
    distribution with n − 1 degrees of freedom and z of the normal one. NaN with one cluster, and with seed None.
    """
    from scipy.stats import norm, t

    value = evaluate(np.ones((1, num_clusters)))[0]
    bounds = np.full((2, len(value)), np.nan)
    if num_clusters > 1 and seed is not None:
        draws = evaluate(draw_clusters(num_clusters, resamples, seed))
        known, tail = ~np.isnan(draws).all(0), (1 - confidence) / 2
        factor = t.ppf(1 - tail, num_clusters - 1) / norm.ppf(1 - tail) * np.sqrt(num_clusters / (num_clusters - 1))
        away = percentiles(draws[:, known], confidence) - np.nanmean(draws[:, known], axis=0)
        bounds[:, known] = value[known] + factor * away
    return np.vstack([value, bounds])


def students_t(each: np.ndarray, confidence: float) -> np.ndarray:
    """[3, n]: mean over independent rows, [rows, n], and its bounds by Student's t with rows − 1 degrees of freedom."""
    from scipy.stats import t

    mean = each.mean(0)
    error = each.std(0, ddof=1) / np.sqrt(len(each)) * t.ppf((1 + confidence) / 2, len(each) - 1)
    return np.stack([mean, mean - error, mean + error])


def jackknife_error(statistic: Callable[[np.ndarray], np.ndarray], blocks: Sequence[np.ndarray]) -> np.ndarray:
    """Standard error of `statistic(sum of the blocks)` that leaving out one block in turn shows; NaN where that is.

    blocks: parts of one shape that add up, such as those of a sketch's coordinates.
    """
    whole, count = sum(blocks), len(blocks)
    left = np.stack([statistic((whole - block) * (count / (count - 1))) for block in blocks])
    return np.sqrt((count - 1) / count * ((left - left.mean(0)) ** 2).sum(0))


def in_brackets(lower: float, upper: float, write: Callable[[float], str]) -> str:
    """Bounds as they stand behind their number, each as `write` has it; nothing where there are none.

    >>> in_brackets(0.25, 0.5, "{:.1f}".format)
    ' [0.2, 0.5]'
    """
    return "" if np.isnan(lower) else f" [{write(lower)}, {write(upper)}]"


def prompt_clusters(table: pd.DataFrame) -> np.ndarray:
    """Number of each row's prompt from 0 on: of `group`, or of (`batch`, `group`) where there is a column batch."""
    if "group" not in table:
        raise InputError("the table has no column group, the number of each token's prompt; give one that has it")
    keys = ["batch", "group"] if "batch" in table else ["group"]
    if table.empty or table[keys].isna().any(axis=None):
        raise InputError(
            f"the table has no rows, or rows without {' and '.join(keys)}; every token belongs to a prompt"
        )
    return table.groupby(keys, observed=True).ngroup().to_numpy()
