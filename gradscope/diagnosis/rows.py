"""Tidy rows: every number of a diagnosis with its bounds, and what a part makes of a measurement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float

from gradscope.errors import InputError
from gradscope.intervals import Column
from gradscope.resampling import FEWEST, Shortage

COLUMNS = ["statistic", "metric", "interval", "value", "lower", "upper", "n", "unit"]
"""metric: "raw" or "adamw" for gradients, else "none"; interval: a label such as "[0, ¼)", "all", or ""; n: number of
tokens behind the value (measured tokens for norms); unit: share, bits, nats, ratio, cosine, correlation, squared (the
unit of a squared gradient norm), norm, tokens, prompts."""
SHORTAGE = ["lacks", "wanted"]
"""lacks: "prompts" or "tokens" if there are too few of them for bounds, else ""; wanted: how many prompts, or measured
tokens of that interval, would give bounds, else 0."""


@dataclass(frozen=True)
class Rows:
    """A part's numbers."""

    rows: pd.DataFrame = field(default_factory=lambda: join_rows([]))
    """The headline numbers; see `COLUMNS` and `SHORTAGE`."""
    frames: Mapping[str, pd.DataFrame] = field(default_factory=dict)
    """Further tables, by name."""
    unweighted: tuple[str, ...] = ()
    """Statistics and frames whose bounds rest on all prompts, including those without a weight."""
    kept: Mapping[str, Any] = field(default_factory=dict)
    """What else the part's sentences and figures need."""

    def without_bounds(self) -> Rows:
        """Remove the bounds of everything weighted: too few prompts have a weight.

        The bootstrap also draws prompts without one, which say nothing about the variation between the others.
        """
        frames = {
            name: frame if name in self.unweighted else _strike(frame, pd.Series(True, frame.index))
            for name, frame in self.frames.items()
        }
        struck = ~self.rows["statistic"].isin(self.unweighted) & self.rows["lower"].notna()
        rows = _strike(self.rows, struck)
        lacks = {"lacks": rows["lacks"].mask(struck, "prompts"), "wanted": rows["wanted"].mask(struck, FEWEST)}
        return replace(self, rows=rows.assign(**lacks), frames=frames)


def make_rows(
    statistic: str,
    found: Float[np.ndarray, "3 k"],
    n: Column | int,
    *,
    unit: str,
    metric: str = "none",
    intervals: Sequence[str] = ("",),
    short: Sequence[Shortage | None] = (),
) -> pd.DataFrame:
    """Make one statistic's row for each interval from its values and bounds; non-finite numbers become NaN.

    n: counts per interval, or one for all. short: what each interval lacks; those that lack anything get no bounds.
    """
    found = np.array(found, dtype=np.float64)
    short = [
        None if np.isnan(value) else each
        for value, each in zip(found[0], short or [None] * found.shape[1], strict=True)
    ]
    found[1:, [each is not None for each in short]] = np.nan
    value, lower, upper = np.where(np.isfinite(found), found, np.nan)
    columns = {"statistic": statistic, "metric": metric, "interval": list(intervals)}
    columns |= {"value": value, "lower": lower, "upper": upper, "n": np.broadcast_to(np.asarray(n), value.shape)}
    columns |= {"unit": unit, "lacks": [each.of if each else "" for each in short]}
    columns |= {"wanted": [each.wanted if each else 0 for each in short]}
    return pd.DataFrame(columns)[[*COLUMNS, *SHORTAGE]].astype({"n": np.int64, "wanted": np.int64})


def one_row(statistic: str, value: float, n: int, *, unit: str) -> pd.DataFrame:
    """Make the row of a number that is not specific to an interval."""
    found = np.array([[value], [np.nan], [np.nan]], dtype=np.float64)
    return make_rows(statistic, found, n, unit=unit)


def join_rows(parts: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Concatenate rows; return an empty table if there are none."""
    parts = [part for part in parts if len(part)]
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=[*COLUMNS, *SHORTAGE])


def pick_row(statistics: pd.DataFrame, statistic: str, metric: str = "none", interval: str = "") -> pd.Series | None:
    """Return a statistic's row, or None if it was not computed. Raises InputError if there are several."""
    chosen = statistics[
        (statistics["statistic"] == statistic) & (statistics["metric"] == metric) & (statistics["interval"] == interval)
    ]
    if len(chosen) > 1:
        raise InputError(f"{statistic} ({metric}, {interval}) occurs {len(chosen)} times; give one diagnosis's rows")
    return chosen.iloc[0] if len(chosen) else None


def _strike(frame: pd.DataFrame, struck: pd.Series) -> pd.DataFrame:
    """Remove the bounds of these rows, but for those of shares of the tokens."""
    ends = [name for name in frame if str(name).endswith(("lower", "upper")) and not str(name).startswith("token_")]
    return frame.assign(**{name: frame[name].mask(struck) for name in ends})
