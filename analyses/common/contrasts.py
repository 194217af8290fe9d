"""Statistics over seeds: means with t intervals, paired differences, and Holm's correction.

The seed is the unit: two variants at one seed start from the same weights and see the same questions, so they are
compared seed by seed. A difference is claimed if its p, corrected over all claims of a figure, is below .05.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pandas as pd
from scipy import stats
from statsmodels.stats.power import TTestPower

LEVEL = 0.95


def mean_interval(values: Sequence[float] | pd.Series | np.ndarray) -> tuple[float, float, float]:
    """Return mean and 95 % t interval over seeds; the interval is NaN for one seed and if all seeds are alike.

    >>> mean_interval([1.0, 2.0, 3.0])
    (2.0, -0.484..., 4.484...)
    """
    values = np.asarray(values, dtype=float)
    if not vary(values):
        return float(values.mean()), np.nan, np.nan
    interval = stats.ttest_1samp(values, 0.0).confidence_interval(LEVEL)
    return float(values.mean()), float(interval.low), float(interval.high)


def vary(values: Sequence[float] | pd.Series | np.ndarray) -> bool:
    """Return whether values differ beyond rounding; else a t test has no spread, and p would be 0.

    >>> vary([0.98, 0.98]), vary([0.5]), vary([0.98, 0.96])
    (False, False, True)
    """
    values = np.asarray(values, dtype=float)
    return len(values) > 1 and bool(np.ptp(values) > 1e-9 * np.abs(values).max())


def summarize(table: pd.DataFrame, value: str, by: Sequence[str] = ("variant", "label")) -> pd.DataFrame:
    """Return a row per group of `by`, in order of appearance: seeds, and mean, lower and upper of `value`."""
    rows = []
    for key, group in table.groupby(list(by), sort=False):
        mean, lower, upper = mean_interval(group[value])
        rows.append(
            dict(zip(by, key, strict=True)) | {"seeds": len(group), "mean": mean, "lower": lower, "upper": upper}
        )
    return pd.DataFrame(rows, columns=[*by, "seeds", "mean", "lower", "upper"])


def compare(table: pd.DataFrame, value: str, pairs: Sequence[tuple[str, str]]) -> pd.DataFrame:
    """Return `differences` with Holm's correction over all pairs: p_holm, and differs (p_holm below .05)."""
    return holm(differences(table, value, pairs))


def differences(table: pd.DataFrame, value: str, pairs: Sequence[tuple[str, str]]) -> pd.DataFrame:
    """Return paired differences of `value` over seeds: a row per pair (variant, baseline).

    table: a row per variant and seed. Columns: variant, baseline, seeds (common to both), difference (mean), lower,
    upper (95 % t interval for this pair alone), p (two-sided paired t test). With fewer than two seeds, or the same
    difference at every seed, there is no interval and no p.
    """
    wide = table.pivot(index="seed", columns="variant", values=value)
    rows = []
    for variant, baseline in pairs:
        known = variant in wide and baseline in wide
        values = (wide[variant] - wide[baseline]).dropna() if known else pd.Series(dtype=float)
        # What rounding leaves of equal numbers is no difference.
        values = values.where(values.abs() > 1e-12 * wide.abs().max().max(), 0.0)
        mean, lower, upper = mean_interval(values) if len(values) else (np.nan, np.nan, np.nan)
        p = float(stats.ttest_1samp(values, 0.0).pvalue) if vary(values) else np.nan
        row = {"variant": variant, "baseline": baseline, "seeds": len(values), "difference": mean}
        rows.append(row | {"lower": lower, "upper": upper, "p": p})
    names = ["variant", "baseline", "seeds", "difference", "lower", "upper", "p"]
    return pd.DataFrame(rows, columns=names)


def welch(
    own: Sequence[float] | np.ndarray, other: Sequence[float] | np.ndarray, level: float = LEVEL
) -> tuple[float, float, float, float]:
    """Return the difference of two means, its interval and p (two-sided) by Welch's t test over independent seeds.

    Interval and p are NaN where an arm has fewer than two seeds, or all of both are alike.

    >>> welch([2.0, 3.0, 4.0], [1.0, 2.0, 3.0])
    (1.0, -1.266..., 3.266..., 0.287...)
    """
    own, other = np.asarray(own, dtype=float), np.asarray(other, dtype=float)
    difference = float(own.mean() - other.mean())
    if min(len(own), len(other)) < 2 or not (vary(own) or vary(other)):
        return difference, np.nan, np.nan, np.nan
    found = stats.ttest_ind(own, other, equal_var=False)
    interval = found.confidence_interval(level)
    return difference, float(interval.low), float(interval.high), float(found.pvalue)


def seeds_to_tell(difference: float, row: Mapping[str, float], *, claims: int = 1, power: float = 0.8) -> float:
    """Return the seeds needed to detect a true difference with this power, given the spread of a row of `differences`.

    Two-sided paired t test at .05 / claims, the strictest step of Holm's correction. NaN if the row has no interval.
    """
    if not spread(row) > 0:
        return np.nan
    needed = TTestPower().solve_power(abs(difference) / spread(row), alpha=(1 - LEVEL) / claims, power=power)
    return float(np.ceil(np.ravel(needed)[0]))


def smallest_told(row: Mapping[str, float], *, claims: int = 1, power: float = 0.8) -> float:
    """Return the smallest true difference that these seeds detect with this power; tested as in `seeds_to_tell`.

    NaN if the row has no interval, or if ten standard deviations would not do.
    """
    if not spread(row) > 0:
        return np.nan
    test = {"nobs": row["seeds"], "alpha": (1 - LEVEL) / claims}
    found = float(np.ravel(TTestPower().solve_power(power=power, **test))[0])
    reached = float(TTestPower().power(found, **test))
    return found * spread(row) if abs(reached - power) < 1e-3 else np.nan


def half_width(spread: float, seeds: int, level: float = LEVEL) -> float:
    """Return half of the t interval of a mean difference, given its standard deviation over seeds."""
    return float(stats.t.ppf((1 + level) / 2, seeds - 1) * spread / np.sqrt(seeds))


def spread(row: Mapping[str, float] | pd.DataFrame) -> float | pd.Series:
    """Return the standard deviation over seeds of the differences behind each row of `differences`."""
    quantile = stats.t.ppf((1 + LEVEL) / 2, row["seeds"] - 1)
    return (row["upper"] - row["lower"]) / 2 * np.sqrt(row["seeds"]) / quantile


def holm(claims: pd.DataFrame) -> pd.DataFrame:
    """Add p_holm and differs to the claims, from their column p; a NaN p is no claim and does not count.

    The k-th smallest p is multiplied by m − k + 1 and is at least as large as the one before (as in statsmodels'
    multipletests, whose garbage collection in every call takes longer than all the rest).
    """
    ordered = claims["p"].dropna().sort_values()
    steps = (ordered * np.arange(len(ordered), 0, -1)).cummax().clip(upper=1.0)
    corrected = steps.reindex(claims.index)
    return claims.assign(p_holm=corrected, differs=corrected < 1 - LEVEL)


def tell_seeds(seeds: Iterable[int]) -> str:
    """Say how many seeds several numbers rest on; numbers without seeds are skipped.

    >>> tell_seeds([6, 3, 0]), tell_seeds([3, 3]), tell_seeds([1])
    ('3 to 6 seeds', '3 seeds', '1 seed')
    """
    counts = sorted({int(count) for count in seeds if count}) or [0]
    words = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"{words} seed{'' if counts == [1] else 's'}"
