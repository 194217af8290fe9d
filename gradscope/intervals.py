"""Probability intervals: assigning tokens, and statistics per interval with confidence intervals.

The paper's "quartiles" are the fixed intervals [0, ¼), [¼, ½), [½, ¾), [¾, 1], not quantiles. Confidence intervals are
over clusters (prompts), since tokens of one prompt are not independent; `resampling` describes them, and how many
prompts and measured tokens they need. For a paired comparison, pass the difference of the two columns to `summarize`.
"""

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from gradscope.errors import InputError
from gradscope.resampling import (
    ANY,
    SHARE,
    SIZE,
    Resampling,
    Scale,
    bootstrap,
    effective_sample_size,
    effective_size_of_shares,
    effective_tokens,
    short_of,
)

if TYPE_CHECKING:
    import pandas as pd

Column = Iterable | np.generic | float
"""Anything that numpy converts to an array: an array, a table column, a list, a number."""

EDGES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Edges of the paper's four intervals."""

WIDE = 10.0
"""Factor from the lower to the upper bound of a mean size above which bounds beyond all sizes are left out."""

_FRACTIONS = {0.25: "¼", 0.5: "½", 0.75: "¾"}


def assign_intervals(prob: Column, edges: Column = EDGES) -> np.ndarray:
    """Return the index of each probability's interval [lo, hi), the last one closed; int64, shaped like `prob`.

    >>> assign_intervals([0.0, 0.2499, 0.25, 0.75, 1.0]).tolist()
    [0, 0, 1, 3, 3]
    """
    edges = _check_edges(edges)
    prob = np.asarray(prob)
    outside = ~((prob >= edges[0]) & (prob <= edges[-1]))  # negated to include NaN
    if outside.any():
        worst = np.atleast_1d(prob)[np.atleast_1d(outside)][0]
        raise InputError(
            f"{int(outside.sum())} value(s) lie outside [{edges[0]:g}, {edges[-1]:g}], the first being {worst}; "
            "give probabilities within the edges"
        )
    return np.asarray(np.minimum(np.searchsorted(edges, prob, side="right") - 1, len(edges) - 2))


def interval_labels(edges: Column = EDGES) -> list[str]:
    """Return a label per interval, with enough digits to distinguish the edges (at least three).

    >>> interval_labels()
    ['[0, ¼)', '[¼, ½)', '[½, ¾)', '[¾, 1]']
    >>> interval_labels([0, 0.9991, 0.9998, 1])
    ['[0, 0.9991)', '[0.9991, 0.9998)', '[0.9998, 1]']
    """
    edges = _check_edges(edges).tolist()
    for digits in range(3, 18):
        names = [_FRACTIONS.get(edge, f"{edge:.{digits}g}") for edge in edges]
        if len(set(names)) == len(names):
            break
    return [f"[{low}, {high}{']' if high == names[-1] else ')'}" for low, high in pairwise(names)]


def name_interval(label: str) -> str:
    """Write a probability interval's label as a condition on π.

    >>> [name_interval(label) for label in ("[0, ¼)", "[¼, ½)", "[¾, 1]", "[0, 1]", "[0.1, 0.9]")]
    ['π < ¼', '¼ ≤ π < ½', 'π ≥ ¾', '0 ≤ π ≤ 1', '0.1 ≤ π ≤ 0.9']
    """
    low, high = label[1:-1].split(", ")
    if low == "0" and label.endswith(")"):
        return f"π < {high}"
    if high == "1" and low != "0":
        return f"π ≥ {low}"
    return f"{low} ≤ π {'≤' if label.endswith(']') else '<'} {high}"


def summarize(
    values: Column,
    intervals: Column,
    clusters: Column,
    *,
    statistic: str = "mean",
    resampling: Resampling = Resampling(),  # noqa: B008  (frozen)
    edges: Column = EDGES,
    probabilities: Column | None = None,
    sizes: Column | None = None,
) -> "pd.DataFrame":
    """Compute the "mean", "sum" or "rms" of `values` per interval, with bounds from resampling clusters.

    Args:
        values, intervals, clusters: one entry per token; intervals from `assign_intervals`, clusters any labels. A NaN
            value is an unmeasured token: it counts in `num_tokens` but not in `num_measured`, and enters no statistic
            (so a sum is over the measured tokens).
        probabilities: sampling probability p of every token (`gradients.sample`). A sum is then the ratio estimate of
            the sum over all tokens, Σ values/p · Σ sizes / (Σ sizes/p over the measured), which is Hájek's for equal
            sizes, and a mean is that sum divided by num_tokens. None: equal within each interval.
        sizes: proxies of the values (of their roots, for an rms), for all tokens; None: equal.

    Returns:
        Columns interval, label, num_tokens, num_measured, value, lower, upper. The mean or rms of no tokens is NaN;
        bounds are NaN if there are too few prompts with measured tokens, or too few tokens (`resampling.short_of`),
        and for a mean or rms of sizes also if no batch could contradict them: see `_says_nothing`.
    """
    settings = {"statistic": statistic, "resampling": resampling, "probabilities": probabilities, "sizes": sizes}
    return _label(summarize_cells(values, intervals, clusters, len(edges) - 1, **settings), edges)


def summarize_cells(
    values: Column,
    cells: Column,
    clusters: Column,
    num_cells: int,
    *,
    statistic: str = "mean",
    resampling: Resampling = Resampling(),  # noqa: B008  (frozen)
    probabilities: Column | None = None,
    sizes: Column | None = None,
) -> "pd.DataFrame":
    """Do the same as `summarize` for arbitrary cells 0 … num_cells − 1, without columns interval and label.

    With a resampling seed of None, lower and upper are NaN.
    """
    if statistic not in ("mean", "sum", "rms"):
        raise InputError(f"statistic is {statistic!r}; give mean, sum or rms")
    values = np.asarray(values, dtype=np.float64)
    measured = ~np.isnan(values)
    amounts = np.where(measured, values**2 if statistic == "rms" else values, 0.0)
    columns, sampled = [amounts, measured], probabilities is not None
    if sampled:
        probabilities = np.asarray(probabilities, dtype=np.float64)
        sizes = np.ones(values.shape) if sizes is None else np.abs(np.asarray(sizes, dtype=np.float64))
        sizes = sizes**2 if statistic == "rms" else sizes
        columns = [amounts / probabilities, measured, sizes, measured * sizes / probabilities, np.ones(values.shape)]
        worth = effective_sample_size(sizes, probabilities, np.asarray(cells), num_cells)
    totals, [sums, counts, *proxies] = _cluster_totals(cells, clusters, columns, num_cells)

    def evaluate(weights: np.ndarray) -> np.ndarray:
        total, tokens = weights @ sums, weights @ counts
        with np.errstate(invalid="ignore", divide="ignore"):  # no token of the interval was drawn
            if proxies:
                whole, sampled, tokens = (weights @ part for part in proxies)
                total = np.where(whole > 0, total * whole / sampled, total)
            mean = total / tokens
        return total if statistic == "sum" else np.sqrt(mean) if statistic == "rms" else mean

    scale = SHARE if statistic == "mean" and not sampled and np.isin(amounts, (0, 1)).all() else SIZE
    scale = scale if (amounts >= 0).all() else ANY
    table = _table(evaluate, totals, counts, resampling, scale, worth if sampled else None)
    if scale is SIZE and statistic != "sum":
        table.loc[_says_nothing(table, np.abs(values[measured]), np.asarray(cells)[measured]), ["lower", "upper"]] = (
            np.nan
        )
    return table


def _says_nothing(table: "pd.DataFrame", sizes: np.ndarray, cells: np.ndarray) -> np.ndarray:
    """Return the cells whose bounds on a mean size contain every measured size and span more than a factor `WIDE`."""
    least, greatest = np.full(len(table), np.inf), np.zeros(len(table))
    np.minimum.at(least, cells, sizes)
    np.maximum.at(greatest, cells, sizes)
    lower, upper = table["lower"].to_numpy(), table["upper"].to_numpy()
    return (lower <= least) & (upper >= greatest) & (upper > WIDE * lower)


def interval_shares(
    intervals: Column,
    clusters: Column,
    *,
    values: Column | None = None,
    resampling: Resampling = Resampling(),  # noqa: B008  (frozen)
    edges: Column = EDGES,
    probabilities: Column | None = None,
    sizes: Column | None = None,
) -> "pd.DataFrame":
    """Compute each interval's share of the tokens or, with `values`, of their sum; columns as in `summarize`.

    Bounds are NaN where those of `summarize` are. Shares add up to 1, so their bounds are not independent.
    probabilities, sizes: as in `summarize`.
    """
    intervals = np.asarray(intervals)
    values = np.ones(intervals.shape) if values is None else np.asarray(values, dtype=np.float64)
    measured = ~np.isnan(values)
    amounts = np.where(measured, values, 0.0)
    totals, [sums, counts] = _cluster_totals(intervals, clusters, [amounts, measured], len(edges) - 1)

    def evaluate(weights: np.ndarray) -> np.ndarray:
        drawn = weights @ sums
        with np.errstate(invalid="ignore"):  # 0/0 if nothing was measured
            return drawn / drawn.sum(-1, keepdims=True)

    worth = None
    if probabilities is not None:
        sizes = np.ones(intervals.shape) if sizes is None else np.abs(np.asarray(sizes, dtype=np.float64))
        worth = effective_sample_size(sizes, np.asarray(probabilities, dtype=np.float64), intervals, len(edges) - 1)
        worth = effective_size_of_shares(np.bincount(intervals, sizes, minlength=len(edges) - 1), worth)
    served = (sums != 0).sum(0)
    return _label(_table(evaluate, totals, counts, resampling, SHARE, worth, served), edges)


def _cluster_totals(
    intervals: Column, clusters: Column, columns: list[np.ndarray], num_intervals: int
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return the number of tokens per interval, and each column summed to [clusters, intervals]."""
    intervals, clusters = np.asarray(intervals), np.asarray(clusters)
    if not intervals.shape == clusters.shape == columns[0].shape or intervals.ndim != 1:
        shapes = [columns[0].shape, intervals.shape, clusters.shape]
        raise InputError(f"values, intervals and clusters have shapes {shapes}; give each one entry per token")
    if intervals.size and not 0 <= intervals.min() <= intervals.max() < num_intervals:
        raise InputError(f"intervals run from {intervals.min()} to {intervals.max()}; the edges make {num_intervals}")
    labels, cluster = np.unique(clusters, return_inverse=True)
    cell, size = cluster * num_intervals + intervals, len(labels) * num_intervals
    sums = [np.bincount(cell, column, minlength=size).reshape(-1, num_intervals) for column in columns]
    return np.bincount(intervals, minlength=num_intervals), sums


def _table(
    evaluate: Callable[[np.ndarray], np.ndarray],
    num_tokens: np.ndarray,
    counts: np.ndarray,
    resampling: Resampling,
    scale: Scale,
    worth: np.ndarray | None,
    served: np.ndarray | None = None,
) -> "pd.DataFrame":
    """Evaluate on the data and on resampled clusters, and make the table.

    worth: of each interval's sample, if any. served: number of clusters behind each interval's statistic; None: those
    with measured tokens.
    """
    import pandas as pd

    measured, prompts = counts.sum(0).astype(np.int64), (counts > 0).sum(0) if served is None else served
    drawn = None if worth is None else effective_tokens(worth, measured)
    found = bootstrap(evaluate, len(counts), measured=drawn, scale=scale, **vars(resampling))
    worth = np.full(len(prompts), np.inf) if worth is None else worth
    found[1:, [short_of(*each) is not None for each in zip(prompts, worth, strict=True)]] = np.nan
    value, lower, upper = found
    return pd.DataFrame(
        {"num_tokens": num_tokens, "num_measured": measured, "value": value, "lower": lower, "upper": upper}
    )


def _label(table: "pd.DataFrame", edges: Column) -> "pd.DataFrame":
    """Prepend columns with each interval's index and label."""
    table.insert(0, "interval", np.arange(len(table)))
    table.insert(1, "label", interval_labels(edges))
    return table


def _check_edges(edges: Column) -> np.ndarray:
    """Return the edges as a float64 array. Raises InputError unless there are two or more, strictly increasing."""
    edges = np.asarray(edges, dtype=np.float64)
    if edges.ndim != 1 or len(edges) < 2 or not (np.diff(edges) > 0).all():
        raise InputError(f"edges are {edges.tolist()}; give at least two strictly increasing numbers")
    return edges
