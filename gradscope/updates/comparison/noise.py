"""Compute signal to noise of summed gradients over prompts, and bounds on norms and cosines, from inner products.

With u_p prompt p's part of the summed gradient U = Σ_p u_p, ‖u_p‖² (`own`) and ⟨u_p, U⟩ (`along`) suffice: leaving out
prompt p turns ‖U‖² into ‖U‖² − 2⟨u_p, U⟩ + ‖u_p‖² and subtracts ‖u_p‖² from Σ_q ‖u_q‖².
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from gradscope.resampling import short_of

Each = Float[np.ndarray, "*k n"]
"""A number per prompt, for each of k summed gradients."""


class Products(NamedTuple):
    """Inner products of summed gradients and their prompts' parts; plain is the reference."""

    own: Each
    """‖u_p‖²."""
    along: Each
    """⟨u_p, U⟩."""
    kernel: Float[np.ndarray, "*k n n"]
    """⟨u_p, u_q⟩, possibly estimated: used only for the spread in the absence of a signal."""
    own_plain: Each
    """⟨u_p, u_p of plain⟩."""
    to_plain: Each
    """⟨u_p, U of plain⟩."""
    from_plain: Each
    """⟨u_p of plain, U⟩."""


def signal_to_noise(found: Products, *, confidence: float = 0.95) -> Float[np.ndarray, "3 *k"]:
    """Return signal over noise of one prompt, as in `interval_gradients`, with bounds; NaN without noise.

    The n·u_p are treated as draws from one distribution; signal is the unbiased estimate of the squared norm of their
    mean, noise that of their variance. The bounds are Student's t with n − 1 degrees of freedom times the root of the
    sum of two variances: the jackknife's over prompts, and that of a sum over pairs of prompts whose gradients have
    mean 0 (a degenerate U statistic, 2·Σ_{p≠q} k_pq² of the centred products k), which the jackknife misses if the
    noise has one direction. Since a signal's error grows with the signal, the upper bound is raised by a further t²/√2
    times the root of the second variance. Bounds are NaN for too few prompts.
    """
    value, left, spread = _ratios(found), _ratios_left(found), _pair_spread(found)
    reach = _quantile(found.own.shape[-1], confidence)
    away = reach * np.hypot(_jackknife(left), spread)
    return np.stack([value, value - away, value + away + reach**2 * spread / np.sqrt(2)])


def signal_to_noise_difference(found: Products, *, confidence: float = 0.95) -> Float[np.ndarray, "3 k"]:
    """Return signal over noise minus the first row's, on the same prompts, with bounds on the difference as above."""
    value, left = _ratios(found), _ratios_left(found)
    scaled = found.kernel / _noise(found)[:, None, None]
    spread = _pair_spread(found._replace(kernel=scaled - scaled[:1]), scale=1.0)
    away = _quantile(found.own.shape[-1], confidence) * np.hypot(_jackknife(left - left[:1]), spread)
    difference = value - value[0]
    return np.stack([difference, difference - away, difference + away])


def norms_and_cosines(
    found: Products, *, confidence: float = 0.95
) -> tuple[Float[np.ndarray, "3 k"], Float[np.ndarray, "3 k"]]:
    """Return ‖U‖ over the first row's, and the cosine with it; bounds: jackknife over prompts with Student's t."""
    square, inner = found.along.sum(-1), found.to_plain.sum(-1)
    square_left = square[:, None] - 2 * found.along + found.own
    inner_left = inner[:, None] - found.to_plain - found.from_plain + found.own_plain
    reach = _quantile(found.own.shape[-1], confidence)
    parts = []
    with np.errstate(invalid="ignore", divide="ignore"):  # no gradient
        for values, left in (
            (np.sqrt(square / square[0]), np.sqrt(square_left / square_left[0])),
            (inner / np.sqrt(square * square[0]), inner_left / np.sqrt(square_left * square_left[0])),
        ):
            away = reach * _jackknife(left)
            parts.append(np.stack([values, values - away, values + away]))
    ratios, cosines = parts
    return np.stack([ratios[0], np.maximum(ratios[1], 0.0), ratios[2]]), np.clip(cosines, -1.0, 1.0)


def _ratios(found: Products) -> Float[np.ndarray, " *k"]:
    n = found.own.shape[-1]
    return _divide(found.along.sum(-1), found.own.sum(-1), n)


def _ratios_left(found: Products) -> Each:
    """Return the ratios with each prompt left out in turn."""
    square = found.along.sum(-1)[..., None] - 2 * found.along + found.own
    return _divide(square, found.own.sum(-1)[..., None] - found.own, found.own.shape[-1] - 1)


def _divide(square: np.ndarray, own: np.ndarray, n: int) -> np.ndarray:
    """Return signal over noise from ‖U‖² and Σ_p ‖u_p‖²."""
    with np.errstate(invalid="ignore", divide="ignore"):
        noise = n * own - square
        return np.where(noise > 0, (square - own) / noise, np.nan)


def _noise(found: Products) -> Float[np.ndarray, " *k"]:
    n = found.own.shape[-1]
    with np.errstate(invalid="ignore"):
        noise = n * found.own.sum(-1) - found.along.sum(-1)
    return np.where(noise > 0, noise, np.nan)


def _pair_spread(found: Products, scale: np.ndarray | float | None = None) -> Float[np.ndarray, " *k"]:
    """Return √(2·Σ_{p≠q} k_pq²) / noise, the standard error of signal over noise if gradients have mean 0."""
    kernel = found.kernel - found.kernel.mean(-1, keepdims=True)
    kernel = kernel - kernel.mean(-2, keepdims=True)
    pairs = (kernel**2).sum((-2, -1)) - (np.diagonal(kernel, axis1=-2, axis2=-1) ** 2).sum(-1)
    return np.sqrt(2 * pairs) / (_noise(found) if scale is None else scale)


def _jackknife(left: Each) -> Float[np.ndarray, " *k"]:
    n = left.shape[-1]
    return np.sqrt((n - 1) / n * ((left - left.mean(-1, keepdims=True)) ** 2).sum(-1))


def _quantile(n: int, confidence: float) -> float:
    from scipy.stats import t

    return float(t.ppf((1 + confidence) / 2, n - 1)) if not short_of(n) else np.nan
