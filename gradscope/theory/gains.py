"""Below the logits: gains of real tokens, the power of 1−π that norms follow, and the sources of their variance.

At the logits ‖e − π‖ / (1−π) lies in [1, √2] by algebra, so a slope of 1 there shows nothing. Below,
‖δ_ℓ‖ = gain · ‖e − π‖, and the theory's power 1 (Eq. 3, arXiv:2505.12929) is right exactly if the gain does not depend
on 1−π. This module measures that, from a token table with a column `group`, the id of the token's prompt. Logarithms
are natural; tokens whose norm is NaN (unmeasured) or 0 are left out; intervals are 95 % percentile bootstraps over
whole prompts, since tokens of one prompt are not independent. Sampled tokens are weighted by 1 / p, p their sampling
probability, in fits and quantiles; counts and extremes are over the measured tokens.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pandas as pd

from gradscope.errors import InputError
from gradscope.gradients import LAYER, LOGITS, PARAMETERS, sampling_weights, weighted_quantiles
from gradscope.resampling import Seed, draw_clusters, percentiles, short_of

FLOOR = 1e-3
"""Fits use tokens with 1−π above this, since the many nearly certain ones would dominate the slope."""
FEWEST = 3
"""Fewest tokens for a line."""


def layer_gains(table: pd.DataFrame, *, floor: float = FLOOR) -> pd.DataFrame:
    """Return the gains ‖δ_ℓ‖ / ‖e − π‖ of the measured tokens, which Eq. 3's products bound; a row per quantity.

    Columns: quantity, tokens, min, q05, median, q95, max, ratio (max / min), log_sd (of the log gain, nats), slope (of
    the log gain against log(1−π) on 1−π > floor: 0 if the theory's power is right; NaN with fewer than 3 tokens).
    """
    rows = []
    for name in quantities(table):
        x, y, _, count = _logs(table, name, 0.0)
        gain = y - _logs(table, name, 0.0, of=LOGITS)[1]
        quantiles = np.exp(weighted_quantiles(gain, count, np.array([0, 0.05, 0.5, 0.95, 1])))
        above = x > np.log(floor)
        [variance, _, covariance] = _moments(x[above], gain[above], count[above])
        rows.append(
            {"quantity": name, "tokens": len(gain)}
            | dict(zip(("min", "q05", "median", "q95", "max"), quantiles, strict=True))
            | {"ratio": quantiles[-1] / quantiles[0], "log_sd": _deviation(gain, count)}
            | {"slope": _divide(covariance, variance) if above.sum() >= FEWEST else np.nan}
        )
    return pd.DataFrame(rows)


def fit_powers(table: pd.DataFrame, *, seed: Seed = 0, floor: float = FLOOR, resamples: int = 1000) -> pd.DataFrame:
    """Fit log norm = intercept + slope · log(1−π) on 1−π > floor, a row per quantity, the logits first.

    Columns: quantity, slope, slope_lower, slope_upper (95 %, NaN with one prompt), intercept, r2, tokens, prompts, and
    beside them `theory` 1 and `sqrt_law` ½. The logits' slope is near 1 by algebra. Raises InputError if no quantity
    has 3 tokens to fit; a quantity with fewer gets NaN.
    """
    rows = []
    for name in [LOGITS, *quantities(table)]:
        x, y, groups, count = _logs(table, name, floor)
        row = dict.fromkeys(("slope", "slope_lower", "slope_upper", "intercept", "r2"), np.nan)
        if len(x) >= FEWEST:
            vx, vy, cxy = _resampled_moments(x, y, groups, count, resamples, seed)
            slopes = _divide(cxy, vx)
            lower, upper = _interval(slopes, groups)
            intercept = _mean(y, count) - slopes[0] * _mean(x, count)
            r2 = _divide(cxy[0] ** 2, vx[0] * vy[0])
            row = dict(zip(row, (slopes[0], lower, upper, intercept, r2), strict=True))
        counts = {"tokens": len(x), "prompts": len(np.unique(groups))}
        rows.append({"quantity": name} | row | counts | {"theory": 1.0, "sqrt_law": 0.5})
    if all(row["tokens"] < FEWEST for row in rows[1:]):
        raise InputError(
            f"fewer than {FEWEST} tokens with 1−π > {floor:g} have a measured norm; measure more tokens or lower floor="
        )
    return pd.DataFrame(rows)


def check_envelopes(table: pd.DataFrame) -> pd.DataFrame:
    """Test C·√2·(1−π) and the loose C·√2·√(1−π) as upper envelopes of norms; a row per quantity.

    With a large enough C both hold, so C (`scale`) is the largest gain of the tokens with π ≤ ½, where the envelopes
    differ by at most √2, and both are tested on tokens with π > ½: `linear_exceeded` and `sqrt_exceeded` of `tokens`
    exceed them, and the median token is below them by the factors `linear_slack` and `sqrt_slack`. Slack and scale are
    NaN if either half has no measured token.
    """
    rows = []
    for name in quantities(table):
        x, y, _, count = _logs(table, name, 0.0)
        likely = x < np.log(0.5)
        gains = (y - _logs(table, name, 0.0, of=LOGITS)[1])[~likely]
        row = {"quantity": name, "scale": np.nan, "tokens": int(likely.sum())}
        scale = gains.max() if len(gains) else np.nan
        row["scale"] = np.exp(scale)
        for law, power in (("linear", 1.0), ("sqrt", 0.5)):
            room = scale + 0.5 * np.log(2) + power * x[likely] - y[likely]
            row[f"{law}_exceeded"] = int((room < 0).sum())
            row[f"{law}_slack"] = np.exp(weighted_quantiles(room, count[likely], np.array([0.5]))[0])
        rows.append(row)
    return pd.DataFrame(rows)


def decompose_variance(
    table: pd.DataFrame, *, seed: Seed = 0, floor: float = FLOOR, resamples: int = 1000
) -> pd.DataFrame:
    """Decompose Var(log norm) = Var(log(1−π)) + Var(log gain) + 2 Cov, gain = norm / (1−π), on 1−π > floor.

    Columns: quantity, variance (nats², of log norm), share_one_minus_prob, share_gain, share_covariance (they add up to
    1; the last can be negative), carried (1−π's part if the covariance is split evenly: Cov(log norm, log(1−π)) /
    Var(log norm)) with carried_lower and carried_upper (95 %), tokens. NaN with fewer than 3 tokens.
    """
    rows = []
    for name in quantities(table):
        x, y, groups, count = _logs(table, name, floor)
        shares = [np.nan] * 7
        if len(x) >= FEWEST:
            vx, vy, cxy = _resampled_moments(x, y, groups, count, resamples, seed)
            parts = [vx[0], vx[0] + vy[0] - 2 * cxy[0], 2 * (cxy[0] - vx[0])]
            carried = _divide(cxy, vy)
            shares = [vy[0], *(_divide(p, vy[0]) for p in parts), carried[0], *_interval(carried, groups)]
        names = ("variance", "share_one_minus_prob", "share_gain", "share_covariance")
        names += ("carried", "carried_lower", "carried_upper")
        rows.append({"quantity": name} | dict(zip(names, shares, strict=True)) | {"tokens": len(x)})
    return pd.DataFrame(rows)


def quantities(table: pd.DataFrame) -> list[str]:
    """Return the columns of norms below the logits, in layer order, the parameters last."""
    layers = sorted((c for c in table.columns if c.startswith(LAYER)), key=lambda c: int(c.removeprefix(LAYER)))
    require_columns(table, [LOGITS, "log_one_minus_prob", "group", PARAMETERS])
    return [*layers, PARAMETERS]


def require_columns(table: pd.DataFrame, columns: list[str]) -> None:
    """Raise InputError if the token table lacks one of these columns."""
    if missing := [c for c in columns if c not in table]:
        hint = "; `group` is the id of the token's prompt" if "group" in missing else ""
        raise InputError(f"the table has no column {', '.join(missing)}; give the table of `measure`{hint}")


def is_measured(table: pd.DataFrame, name: str, floor: float) -> np.ndarray:
    """Return the mask of tokens with 1−π > floor whose norms, `name` and at the logits, are known and not 0."""
    require_columns(table, [LOGITS, "log_one_minus_prob", "group", name])
    x, norm, logits = (table[c].to_numpy(np.float64) for c in ("log_one_minus_prob", name, LOGITS))
    known = np.isfinite(x) & np.isfinite(norm) & np.isfinite(logits)
    return known & (x > (np.log(floor) if floor > 0 else -np.inf)) & (norm > 0) & (logits > 0)


def _logs(
    table: pd.DataFrame, name: str, floor: float, *, of: str | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return (log(1−π), log norm, prompt, weight) of the tokens in `is_measured`.

    of: the column to use instead of `name`, on the same tokens.
    """
    keep = is_measured(table, name, floor)
    x, norm = (table[c].to_numpy(np.float64)[keep] for c in ("log_one_minus_prob", of or name))
    return x, np.log(norm), table["group"].to_numpy()[keep], sampling_weights(table)[keep]


def _mean(values: np.ndarray, count: np.ndarray) -> float:
    return (count * values).sum() / count.sum()


def _deviation(values: np.ndarray, count: np.ndarray) -> float:
    """Return the standard deviation (n − 1)."""
    if len(values) < 2:
        return np.nan
    return np.sqrt((count * (values - _mean(values, count)) ** 2).sum() / (count.sum() - count.mean()))


def _moments(x: np.ndarray, y: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Return Var x, Var y and Cov xy, divided by n."""
    if not len(x):
        return np.full(3, np.nan)
    x, y = x - _mean(x, count), y - _mean(y, count)
    return np.array([_mean(x * x, count), _mean(y * y, count), _mean(x * y, count)])


def _resampled_moments(
    x: np.ndarray, y: np.ndarray, groups: np.ndarray, count: np.ndarray, resamples: int, seed: Seed
) -> np.ndarray:
    """Return `_moments` of the sample, then of resampled prompts: [3, 1 + resamples]."""
    x, y = x - _mean(x, count), y - _mean(y, count)
    labels, cluster = np.unique(groups, return_inverse=True)
    parts = (np.ones_like(x), x, y, x * x, y * y, x * y)
    sums = np.stack([np.bincount(cluster, count * v) for v in parts], axis=1)
    draws = draw_clusters(len(labels), resamples, seed)
    n, sx, sy, sxx, syy, sxy = (np.vstack([np.ones(len(labels)), draws]) @ sums).T
    return np.stack([sxx / n - (sx / n) ** 2, syy / n - (sy / n) ** 2, sxy / n - sx * sy / n**2])


def _divide(over: npt.ArrayLike, under: npt.ArrayLike) -> npt.ArrayLike:
    """Divide variances (the sample's first); NaN where `under` is 0 up to rounding."""
    under = np.asarray(under, dtype=np.float64)
    return np.asarray(over) / np.where(under > max(1e-12 * np.ravel(under)[0], 1e-24), under, np.nan)


def _interval(draws: np.ndarray, groups: np.ndarray) -> tuple[float, float]:
    """Return percentiles of the resamples (all but the first); NaN with too few prompts."""
    enough = not short_of(len(np.unique(groups)))
    known = np.where(np.isfinite(draws[1:]) & enough, draws[1:], np.nan)
    return tuple(percentiles(known[:, None], 0.95)[:, 0].tolist())
