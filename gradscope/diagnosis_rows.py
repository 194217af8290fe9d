"""Rows of a diagnosis's statistics: a number, its interval and what it rests on, in one tidy table."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from jaxtyping import Float

from gradscope.errors import InputError
from gradscope.intervals import Column

COLUMNS = ["statistic", "metric", "interval", "value", "lower", "upper", "n", "unit"]
"""metric: "raw" or "adamw" for a gradient, "none" for what is none; interval: a label such as "[0, ¼)", "all", or "";
n: the tokens that the number rests on, measured ones where norms are meant; unit: share, bits, nats, ratio, cosine,
squared (the unit of a squared gradient norm), norm, tokens, prompts."""


def make_rows(
    statistic: str,
    found: Float[np.ndarray, "3 k"],
    n: Column | int,
    *,
    unit: str,
    metric: str = "none",
    intervals: Sequence[str] = ("",),
) -> pd.DataFrame:
    """A row per interval of one statistic: found holds the values, then lower and upper bounds; not finite is NaN.

    n: a count per interval, or one for all.
    """
    value, lower, upper = np.where(np.isfinite(found), found, np.nan)
    columns = {"statistic": statistic, "metric": metric, "interval": list(intervals)}
    columns |= {"value": value, "lower": lower, "upper": upper, "n": np.broadcast_to(np.asarray(n), value.shape)}
    return pd.DataFrame(columns | {"unit": unit})[COLUMNS].astype({"n": np.int64})


def one_row(
    statistic: str, value: float, n: int, *, unit: str, metric: str = "none", interval: str = ""
) -> pd.DataFrame:
    """A number that has no interval."""
    found = np.array([[value], [np.nan], [np.nan]], dtype=np.float64)
    return make_rows(statistic, found, n, unit=unit, metric=metric, intervals=[interval])


def join_rows(parts: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """All rows, one below the other; the empty table without any."""
    parts = [part for part in parts if len(part)]
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=COLUMNS)


def pick_row(statistics: pd.DataFrame, statistic: str, metric: str = "none", interval: str = "") -> pd.Series | None:
    """The row of that name; None where it was not computed. InputError where a name is there twice."""
    chosen = statistics[
        (statistics["statistic"] == statistic) & (statistics["metric"] == metric) & (statistics["interval"] == interval)
    ]
    if len(chosen) > 1:
        raise InputError(f"{statistic} ({metric}, {interval}) is there {len(chosen)} times; give one diagnosis's rows")
    return chosen.iloc[0] if len(chosen) else None
