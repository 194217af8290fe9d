"""Statistics of an update's effect on tokens: who moved in the direction of its weight, and similarity of two updates.

Tables come from `updates.movement_table`: a row per kept response token, and for each update NAME the columns
delta_prob.NAME, delta_logprob.NAME and delta_log_odds.NAME. Direction is judged by the log odds log π − log(1−π), which
still move where π rounds to 1. `by` is any column of the table; results have a row per value × sign of `against`, for a
categorical in the order of its categories and including empty ones.

Part of the "wrong" directions is unavoidable. Responses of a group share contexts, especially at their beginning, and a
(context, token) pair that occurs in both a good and a bad response can only move one way, so one of the two is wrong
whatever the update does. The loss depends only on the pair's **net weight**, the sum over its occurrences;
`against=` a column of such sums judges directions by it.

Bounds are bootstrap percentiles over prompts: `group`, or (`batch`, `group`) if the table has a column batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from gradscope.errors import InputError, checked
from gradscope.intervals import EDGES, assign_intervals, interval_labels, summarize_cells
from gradscope.objective import TokenStatistics, fill_unknown
from gradscope.resampling import Resampling, Seed, bootstrap, prompt_clusters
from gradscope.rollouts import TokenBatch

Number = int | float

VALUES = ("delta_prob", "delta_logprob", "delta_log_odds")
"""Measures of a movement: Δπ, Δ log π and Δ(log π − log(1−π)), in nats."""
SIGNS = ("positive", "negative")


@checked
def right_direction_shares(
    table: pd.DataFrame,
    *,
    name: str = "all",
    by: str = "interval",
    against: str = "advantage",
    values: Iterable | None = None,
    seed: Seed = 0,
    confidence: float = 0.95,
    resamples: int = 1000,
) -> pd.DataFrame:
    """Return the share of tokens that rose where `against` is positive, and that fell where it is negative (Fig. 3).

    against: "advantage" or another column; tokens where it is 0 or NaN are ignored.
    values: the values of `by` that get rows; None: those that occur. seed None: no bounds.
    Columns: `by`; sign ("positive", "negative"); num_tokens with that sign; tied, those that did not move; share, the
    fraction of moved tokens that moved in the right direction, NaN without any; lower, upper. Raises InputError for a
    missing movement or column, if `against` is unknown everywhere, and for a movement that is NaN.
    """
    rows, cells, signs = _cells(table, by, against, values)
    moved = np.sign(_movement(table, "delta_log_odds", name))
    right = np.where(moved == 0, np.nan, moved == signs)
    resampling = Resampling(seed, confidence, resamples)
    shares = summarize_cells(right, cells, prompt_clusters(table), len(rows) + 1, resampling=resampling)[:-1]
    rows["num_tokens"], rows["tied"] = shares["num_tokens"], shares["num_tokens"] - shares["num_measured"]
    return rows.assign(share=shares["value"], lower=shares["lower"], upper=shares["upper"])


def batch_direction_shares(
    before: TokenStatistics, after: TokenStatistics, batch: TokenBatch, *, edges: Sequence[Number] = EDGES
) -> pd.DataFrame:
    """Return `right_direction_shares` against a batch's advantages, from statistics [B, S] before and after its update.

    Intervals are of π_old, or of π before the update if unknown. Columns: interval, label, sign, num_tokens, tied,
    share; a row per interval and sign, even without tokens. Raises InputError for a batch without advantages.
    """
    if batch.advantages is None:
        raise InputError("the batch has no advantages to judge directions by; resolve them first")
    keep, labels = batch.response_mask, interval_labels(edges)
    prob = fill_unknown(batch.old_logprobs, before.logprob)[keep].double().exp().clamp(max=1.0).numpy()
    columns = {
        "interval": assign_intervals(prob, edges),
        "advantage": batch.advantages[keep].numpy(),
        "group": batch.group_ids[:, None].expand(keep.shape)[keep].numpy(),
        "delta_log_odds.all": log_odds_change(before, after)[keep].numpy(),
    }
    shares = right_direction_shares(pd.DataFrame(columns), values=range(len(labels)), seed=None)
    shares.insert(1, "label", [label for label in labels for _ in SIGNS])
    return shares.drop(columns=["lower", "upper"])


def log_odds_change(before: TokenStatistics, after: TokenStatistics) -> Float[Tensor, "*tokens"]:
    """Return Δ(log π − log(1−π)), nats, float64: 0 for tokens that stay at 0 or 1, infinite on reaching it."""
    gained, lost = (
        torch.where(new == old, 0.0, new.double() - old.double())  # −inf may stay −inf
        for old, new in ((before.logprob, after.logprob), (before.log_one_minus_prob, after.log_one_minus_prob))
    )
    return gained - lost


@dataclass(frozen=True)
class Similarity:
    """The similarity of two updates on tokens outside the updated intervals."""

    num_tokens: int
    correlation: float
    """Pearson's correlation; NaN if either update moved all tokens equally."""
    lower: float
    upper: float


@checked
def similarity(
    table: pd.DataFrame,
    a: str,
    b: str,
    *,
    outside: int | Iterable,
    value: str = "delta_log_odds",
    seed: Seed = 0,
    confidence: float = 0.95,
    resamples: int = 1000,
) -> Similarity:
    """Return the Pearson correlation of two updates' movements over tokens outside the updated interval(s).

    Fig. 1's "(e) closely matches (c)" is ``similarity(table, "all", "only-0", outside=0, …)``, its "(f) does not"
    ``similarity(table, "all", "only-3", outside=3, …)``. outside: an interval or several; []: over all tokens.
    Raises InputError for missing movements or `interval`, and if a movement is not finite.
    """
    _require(table, ["interval"])
    chosen = ~np.isin(table["interval"], np.asarray(outside))
    moved = {name: _movement(table, value, name) for name in (a, b)}
    if infinite := [name for name, values in moved.items() if np.isinf(values).any()]:
        raise InputError(f"{value}.{infinite[0]} is infinite on some tokens; use delta_prob, or drop them")
    x, y = (_standardised(moved[name][chosen]) for name in (a, b))
    labels, cluster = np.unique(prompt_clusters(table)[chosen], return_inverse=True)
    sums = np.stack([np.bincount(cluster, p) for p in (np.ones_like(x), x, y, x * x, y * y, x * y)], axis=1)

    def evaluate(weights: np.ndarray) -> np.ndarray:
        return _correlation(weights @ sums)[:, None]

    found = bootstrap(evaluate, len(labels), seed=seed, confidence=confidence, resamples=resamples)
    return Similarity(int(chosen.sum()), *(float(number) for number in found[:, 0]))


def _cells(
    table: pd.DataFrame, by: str, against: str, values: Iterable | None
) -> tuple[pd.DataFrame, np.ndarray, np.ndarray]:
    """Return the rows value × sign, each token's row (one past the last: none) and each token's sign."""
    _require(table, [by, against])
    if by == "sign":
        raise InputError("by= is `sign`, a column of the result; rename the column")
    if not table[against].notna().any():
        raise InputError(f"{against} is unknown for every token; give advantages or rewards")
    if not pd.api.types.is_numeric_dtype(table[against]):
        raise InputError(f"{against} is not numeric; give one of numbers, such as advantage")
    values = _values(table[by]) if values is None else pd.Index(values)
    if not values.is_unique:
        raise InputError(f"values= has one twice: {list(values)}; give each value of {by} once")
    code, sign = values.get_indexer(table[by].to_numpy()), np.sign(table[against].to_numpy(np.float64))
    rows = pd.DataFrame({by: values.repeat(2), "sign": [*SIGNS] * len(values)})
    return rows, np.where((code >= 0) & (np.abs(sign) == 1), 2 * code + (sign < 0), len(rows)), sign


def _values(column: pd.Series) -> pd.Index:
    """Return a categorical's categories, or else the sorted values that occur."""
    if isinstance(column.dtype, pd.CategoricalDtype):
        return column.cat.categories
    return pd.Index(pd.factorize(column, sort=True)[1])


def _movement(table: pd.DataFrame, value: str, name: str) -> np.ndarray:
    """Return the column of a movement in float64. Raises InputError if it is missing or NaN."""
    if value not in VALUES:
        raise InputError(f"value is {value!r}; known are {', '.join(VALUES)}; give one of them")
    if (column := f"{value}.{name}") not in table:
        known = [c.removeprefix(f"{value}.") for c in table.columns if str(c).startswith(f"{value}.")]
        raise InputError(f"the table has no column {column}; the movements in it are: {', '.join(known) or 'none'}")
    moved = table[column].to_numpy(np.float64)
    if np.isnan(moved).any():
        raise InputError(f"{column} is NaN on {np.isnan(moved).sum()} tokens; give movements of a policy without NaN")
    return moved


def _require(table: pd.DataFrame, columns: Iterable[str]) -> None:
    if missing := [c for c in columns if c not in table]:
        raise InputError(f"the table has no column {', '.join(missing)}; give the table of `movement_table`")


def _standardised(values: np.ndarray) -> np.ndarray:
    """Standardise to mean 0 and variance 1, to preserve digits in sums of squares; zeros if all values are equal."""
    if not len(values) or np.ptp(values) == 0:
        return np.zeros_like(values)
    return (values - values.mean()) / values.std()


def _correlation(sums: np.ndarray) -> np.ndarray:
    """Return Pearson's correlation [draws] from sums of 1, x, y, x², y², xy [draws, 6]; NaN if x or y is constant."""
    with np.errstate(invalid="ignore"):  # 0/0 if no token was drawn
        _, sx, sy, sxx, syy, sxy = (sums / sums[:, :1]).T
        vx, vy = sxx - sx * sx, syy - sy * sy
        variances = np.where((vx > 1e-12) & (vy > 1e-12), vx * vy, np.nan)
        return np.clip((sxy - sx * sy) / np.sqrt(variances), -1, 1)
