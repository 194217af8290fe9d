"""Summed gradients by interval and prompt: shares with confidence intervals, signal, noise; plain or in AdamW's metric.

g_{p,a} is prompt p's part of G_a, the gradient of the loss over the tokens of interval a; G = Σ_a G_a. All numbers
derive from the inner products ⟨g_{p,a}, g_{q,b}⟩, one matrix [n·A, n·A] (`TokenJacobian.gram`), so prompts can be
redrawn without another backward pass. Bounds on shares, ratios, cosines with G, indices and signals include the error
of sketches; norms, noise and cosines between intervals have no bounds.

**Shares, cosines and indices** have bounds from redrawn prompts. A redrawn batch has about twice the noise, which
increases squared norms and pulls shares towards those of the noise. The percentiles are therefore shifted by the
bootstrap's own bias and widened by Student's t, by the n/(n−1) of a variance, and to a jackknife's width (see
`centred_bootstrap`).
**Signal** is the unbiased estimate of ‖E G_a‖², n/(n−1)·(‖G_a‖² − Σ_p ‖g_{p,a}‖²), for prompts drawn from one
distribution; it may be negative. **Noise** is the estimate of E‖G_a − E G_a‖², so that signal + noise = ‖G_a‖² exactly.
The **signal fraction**, signal/‖G_a‖², is about the expected cosine with the G_a of another such batch. Bounds on
signal are a jackknife over prompts with Student's t (a redrawn batch pairs a prompt with itself, which biases a squared
norm) that allows for prompts of unequal size (`bound_products_by_folds`); those on the fraction are signal's over this
batch's ‖G_a‖².
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from jaxtyping import Float, Int

from gradscope.diagnosis.rows import join_rows, make_rows
from gradscope.gradients import Gram
from gradscope.resampling import Seed, Shortage, bound_products_by_folds, centred_bootstrap, short_of

Pairs = Float[np.ndarray, "n A n A"]
QUANTILE = 0.975
"""The upper end of a 95 % interval."""


def gradient_rows(
    gram: Gram,
    tokens: Float[np.ndarray, "n A"],
    labels: Sequence[str],
    *,
    metric: str,
    seed: Seed = 0,
    resamples: int = 1000,
) -> pd.DataFrame:
    """Return rows per interval and for "all": `sum_rows`, and `signal_rows`."""
    shares = sum_rows(gram, tokens, labels, metric=metric, seed=seed, resamples=resamples)
    return join_rows([shares, signal_rows(gram, tokens, labels, metric=metric)])


def sum_rows(
    gram: Gram,
    tokens: Float[np.ndarray, "n A"],
    labels: Sequence[str],
    *,
    metric: str,
    seed: Seed = 0,
    resamples: int = 1000,
) -> pd.DataFrame:
    """Return rows per interval; see the module for definitions and bounds.

    gradient_share, ⟨G_a, G⟩/‖G‖²; norm_ratio, ‖G_a‖/‖G‖; cosine_with_all, of G_a and G; gradient_index, log₂ of its
    share of Σ_b ‖G_b‖² over its share of the tokens; gradient_norm, ‖G_a‖, also of "all" (no bounds). gram: of all
    pairs of prompts, with a row of weights per interval. tokens: counts by prompt and interval. Values are NaN for
    intervals without tokens or gradient, bounds with a single prompt.
    """
    size, pairs, everyone = len(labels), gram.products, np.ones((1, len(tokens)))
    known = {"seed": seed, "resamples": resamples}
    found = centred_bootstrap(lambda draws: _ratios(pairs, tokens, draws), len(pairs), **known)
    error = gram.error(lambda pairs, _: _ratios(pairs, tokens, everyone)[0])
    found = _widen(found, error).reshape(3, 4, size)
    found[:, 1], found[:, 2] = np.maximum(found[:, 1], 0.0), np.clip(found[:, 2], -1.0, 1.0)
    counts, units = tokens.sum(0), {"gradient_share": "share", "norm_ratio": "ratio"}
    found = np.where(counts > 0, found, np.nan)
    units |= {"cosine_with_all": "cosine", "gradient_index": "bits"}
    short = [] if seed is None else _shortages(pairs)[:-1]
    parts = [
        make_rows(name, found[:, place], counts, unit=unit, metric=metric, intervals=labels, short=short)
        for place, (name, unit) in enumerate(units.items())
    ]
    counts = np.append(counts, counts.sum())
    norms = np.where(counts > 0, signal_and_noise(_own_blocks(pairs))["gradient_norm"], np.nan)
    return join_rows(
        [*parts, make_rows("gradient_norm", norms, counts, unit="norm", metric=metric, intervals=[*labels, "all"])]
    )


def signal_rows(gram: Gram, tokens: Float[np.ndarray, "n A"], labels: Sequence[str], *, metric: str) -> pd.DataFrame:
    """Return signal, noise and signal_fraction per interval and for "all"; arguments as in `sum_rows`."""
    pairs, counts = gram.products, tokens.sum(0)
    numbers = signal_and_noise(_own_blocks(pairs))
    error = gram.error(lambda pairs, _: signal_and_noise(_own_blocks(pairs))["signal"][0])
    numbers["signal"] = _widen(numbers["signal"], error)
    counts = np.append(counts, counts.sum())
    with np.errstate(invalid="ignore", divide="ignore"):
        fraction = numbers["signal"] / numbers["gradient_norm"][0] ** 2
    # Noise is a variance, so signal cannot exceed the whole.
    numbers["signal_fraction"] = np.minimum(fraction, 1.0)
    common = {"metric": metric, "intervals": [*labels, "all"], "short": _shortages(pairs)}
    units = {"signal": "squared", "noise": "squared", "signal_fraction": "share"}
    return join_rows(
        [
            make_rows(name, np.where(counts > 0, numbers[name], np.nan), counts, unit=unit, **common)
            for name, unit in units.items()
        ]
    )


def _shortages(pairs: Pairs) -> list[Shortage | None]:
    """Return what each interval and, last, all together lack for bounds: prompts with a gradient there."""
    return [short_of(prompts) for prompts in (np.einsum("kpp->kp", _own_blocks(pairs)) > 0).sum(1)]


def signal_and_noise(grams: Float[np.ndarray, "k n n"]) -> dict[str, Float[np.ndarray, "3 k"]]:
    """Compute gradient_norm, signal and noise of k groups of tokens, from inner products of n prompts' gradients.

    Each is value, lower and upper bound. Only signal has bounds: `bound_products_by_folds` with prompts as folds; NaN
    for too few prompts. Signal and noise are NaN for a single prompt.
    """
    n = grams.shape[1]
    square, own = grams.sum((1, 2)), np.einsum("kpp->k", grams)
    out = {name: np.full((3, len(grams)), np.nan) for name in ("gradient_norm", "signal", "noise")}
    out["gradient_norm"][0] = np.sqrt(np.maximum(square, 0.0))
    if n < 2:
        return out
    apart = square - own
    out["signal"][0] = n / (n - 1) * apart
    out["noise"][0] = square - out["signal"][0]
    if short_of(n):
        return out
    # Without prompt p, the sum over pairs of different prompts loses a row and a column.
    diagonal = np.einsum("kpp->kp", grams)
    left = apart[:, None] - 2 * (grams.sum(2) - diagonal)
    signals = n**2 / ((n - 1) * (n - 2)) * left
    for place, signal in enumerate(out["signal"][0]):
        found = bound_products_by_folds(np.array([signal]), signals[place][:, None], diagonal[place])
        out["signal"][:, place] = found[:, 0]
    return out


def cosine_matrix(pairs: Pairs) -> pd.DataFrame:
    """Return cosines between the G_a, a row and a column per interval; NaN without a gradient."""
    products = pairs.sum((0, 2))
    norms = np.sqrt(np.diag(products))
    with np.errstate(invalid="ignore", divide="ignore"):
        return pd.DataFrame(products / np.outer(norms, norms))


def _ratios(
    pairs: Pairs, tokens: Float[np.ndarray, "n A"], draws: Float[np.ndarray, "r n"] | Int[np.ndarray, "r n"]
) -> Float[np.ndarray, "r A4"]:
    """Return share, norm ratio, cosine and index of each interval in each draw of prompts."""
    weights = draws.astype(np.float64)
    products, counts = _products(pairs, weights), weights @ tokens
    squares, whole, along = np.einsum("raa->ra", products), products.sum((1, 2))[:, None], products.sum(2)
    with np.errstate(invalid="ignore", divide="ignore"):  # no gradient, no token
        parts = [
            along / whole,
            np.sqrt(squares / whole),
            along / np.sqrt(squares * whole),
            np.log2(squares / squares.sum(1, keepdims=True) / (counts / counts.sum(1, keepdims=True))),
        ]
    return np.where(np.isfinite(np.hstack(parts)), np.hstack(parts), np.nan)


def _products(pairs: Pairs, weights: Float[np.ndarray, "r n"]) -> Float[np.ndarray, "r A A"]:
    """Return ⟨G_a, G_b⟩ for each draw of prompts."""
    size = pairs.shape[1]
    out = np.empty((len(weights), size, size))
    for a in range(size):
        for b in range(a, size):
            out[:, a, b] = out[:, b, a] = ((weights @ pairs[:, a, :, b]) * weights).sum(1)
    return out


def _own_blocks(pairs: Pairs) -> Float[np.ndarray, "A1 n n"]:
    """Return ⟨g_{p,a}, g_{q,a}⟩ of each interval and, last, of all together."""
    return np.concatenate([np.einsum("paqa->apq", pairs), pairs.sum((1, 3))[None]])


def _widen(found: Float[np.ndarray, "3 k"], error: Float[np.ndarray, " k"]) -> Float[np.ndarray, "3 k"]:
    """Return value and bounds, widened by an independent error."""
    from scipy.stats import norm

    value, reach = found[0], norm.ppf(QUANTILE) * error
    lower, upper = (np.hypot(found[side] - value, reach) for side in (1, 2))
    return np.stack([value, value - lower, value + upper]) if error.any() else found
