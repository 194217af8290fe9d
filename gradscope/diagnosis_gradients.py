"""The summed gradients of intervals, prompt by prompt: shares with intervals, signal against noise, AdamW's metric.

g_{p,a} is prompt p's part of G_a, the gradient of the loss over the tokens of interval a; G = Σ_a G_a. All numbers are
inner products ⟨g_{p,a}, g_{q,b}⟩, one matrix [n·A, n·A], so that prompts can be redrawn without another backward pass.
Memory besides the model: n·A vectors as long as the parameters. Where that is over the budget, prompts are dealt into
as many blocks as fit, two at least, and blocks take the place of prompts throughout.

**Shares, cosines and indices** have bounds from redrawn prompts. A redrawn batch has about twice the noise, which lifts
squared norms and pulls shares towards those of the noise: so the percentiles are moved by the bootstrap's own bias, and
widened as Student's t and the n/(n−1) of a variance ask at few prompts (see `centred_bootstrap`).
**Signal** is the unbiased estimate of ‖E G_a‖², n/(n−1)·(‖G_a‖² − Σ_p ‖g_{p,a}‖²), where prompts are draws of one
distribution; it may be negative. **Noise** is that of E‖G_a − E G_a‖², so that signal + noise = ‖G_a‖² exactly; and the
**signal fraction**, signal/‖G_a‖², is what the cosine with the G_a of another such batch is to be expected near. The
bounds of these two are a jackknife over prompts with Student's t (a redrawn batch counts a prompt with itself, which
biases a squared norm); the fraction's are signal's over this batch's ‖G_a‖².
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from scipy.stats import norm, t
from torch import Tensor, nn
from tqdm import tqdm

from gradscope.batch import TokenBatch
from gradscope.diagnosis_rows import join_rows, make_rows
from gradscope.group_gradients import gram
from gradscope.weighted_gradients import weighted_gradients, zero_vectors

Gram = Float[np.ndarray, "n A n A"]

SLICE = 1 << 24
"""Numbers that are widened to float64 at a time."""


def deal_prompts(
    batch: TokenBatch, model: nn.Module, num_intervals: int, *, memory: int, generator: torch.Generator
) -> list[Tensor]:
    """Rows of the batch in as many blocks of whole prompts as there are, or as `memory` bytes of gradients allow."""
    # Without a token there is no gradient, and no prompt.
    prompts = batch.group_ids[batch.response_mask.any(1)].unique()
    size = zero_vectors(model, 0)
    most = max(2, memory // (num_intervals * size.shape[1] * size.element_size()))
    if len(prompts) > most:
        prompts = prompts[torch.randperm(len(prompts), generator=generator)]
    return [torch.isin(batch.group_ids, part).nonzero()[:, 0] for part in prompts.tensor_split(min(most, len(prompts)))]


def block_gradients(
    model: nn.Module,
    batch: TokenBatch,
    seeds: Float[Tensor, "A B S"],
    blocks: Sequence[Tensor],
    *,
    micro_batch_size: int,
    progress: bool = False,
) -> Float[Tensor, "n A P"]:
    """g_{p,a} of each block, the rows of some prompts: Σ_t seeds[a, t]·∇ log π_t over its tokens."""
    vectors = zero_vectors(model, len(blocks), len(seeds))
    for vector, rows in zip(vectors, tqdm(blocks, "gradients", disable=not progress or None), strict=True):
        vector.copy_(weighted_gradients(model, batch.select(rows), seeds[:, rows], micro_batch_size=micro_batch_size))
    return vectors


def block_products(vectors: Float[Tensor, "n A P"]) -> Gram:
    """⟨g_{p,a}, g_{q,b}⟩ in float64, in slices of the parameters that are small beside the vectors."""
    n, size, length = vectors.shape
    width = max(1, min(length, SLICE // (n * size)))
    found = sum(gram(part) for part in vectors.flatten(0, 1).split(width, dim=1))
    return found.numpy().reshape(n, size, n, size)


def signed_squares(
    model: nn.Module,
    batch: TokenBatch,
    seeds: Float[Tensor, "A B S"],
    blocks: Sequence[Tensor],
    scale: Float[Tensor, " P"],
    *,
    passes: int,
    micro_batch_size: int,
    generator: torch.Generator,
    progress: bool = False,
) -> Float[np.ndarray, "n A"]:
    """Σ_t ‖scale ∘ w_t g_t‖² of each block and interval, estimated without bias from passes of random signs.

    ‖Σ_t z_t·w_t·g_t‖² with z_t = ±1 has that mean; each pass costs a backward pass per interval.
    """
    out = np.zeros((len(blocks), len(seeds)))
    for block, rows in enumerate(tqdm(blocks, "random signs", disable=not progress or None)):
        for _ in range(passes):
            signs = 2.0 * torch.randint(2, seeds[0, rows].shape, generator=generator) - 1
            settings = {"micro_batch_size": micro_batch_size}
            found = weighted_gradients(model, batch.select(rows), seeds[:, rows] * signs, **settings)
            for a, vector in enumerate(found.mul_(scale)):
                out[block, a] += sum(p.double().square().sum().item() for p in vector.split(1 << 20)) / passes
    return out


def gradient_rows(
    pairs: Gram,
    tokens: Float[np.ndarray, "n A"],
    labels: Sequence[str],
    *,
    metric: str,
    rng: np.random.Generator | None,
    confidence: float = 0.95,
    resamples: int = 1000,
) -> pd.DataFrame:
    """Rows per interval and for "all": see the module for what they are and what their bounds mean.

    gradient_norm, ‖G_a‖ (no bounds); gradient_share, ⟨G_a, G⟩/‖G‖²; norm_ratio, ‖G_a‖/‖G‖; cosine_with_all, of G_a and
    G; gradient_index, log₂ of its share of Σ_b ‖G_b‖² over its share of the tokens; signal, noise, signal_fraction.
    tokens: counts by block and interval. NaN where an interval has no token or no gradient, bounds with one block.
    """
    size = len(labels)
    settings = {"rng": rng, "confidence": confidence, "resamples": resamples}
    found = centred_bootstrap(lambda draws: _ratios(pairs, tokens, draws), len(pairs), **settings).reshape(3, 4, size)
    found[:, 1], found[:, 2] = np.maximum(found[:, 1], 0.0), np.clip(found[:, 2], -1.0, 1.0)
    counts = tokens.sum(0)
    found = np.where(counts > 0, found, np.nan)
    common = {"metric": metric, "intervals": labels}
    parts = [
        make_rows("gradient_share", found[:, 0], counts, unit="share", **common),
        make_rows("norm_ratio", found[:, 1], counts, unit="ratio", **common),
        make_rows("cosine_with_all", found[:, 2], counts, unit="cosine", **common),
        make_rows("gradient_index", found[:, 3], counts, unit="bits", **common),
    ]
    everything = {"metric": metric, "intervals": [*labels, "all"]}
    numbers = signal_and_noise(np.concatenate([_own_blocks(pairs), pairs.sum((1, 3))[None]]), confidence=confidence)
    counts = np.append(counts, counts.sum())
    for name, unit in (("gradient_norm", "norm"), ("signal", "squared"), ("noise", "squared")):
        parts.append(make_rows(name, np.where(counts > 0, numbers[name], np.nan), counts, unit=unit, **everything))
    with np.errstate(invalid="ignore", divide="ignore"):
        fraction = numbers["signal"] / numbers["gradient_norm"][0] ** 2
    # Noise is a variance, so that no signal exceeds the whole.
    fraction = np.where(counts > 0, np.minimum(fraction, 1.0), np.nan)
    return join_rows([*parts, make_rows("signal_fraction", fraction, counts, unit="share", **everything)])


def centred_bootstrap(
    evaluate: Callable[[np.ndarray], np.ndarray],
    num_clusters: int,
    *,
    rng: np.random.Generator | None,
    confidence: float = 0.95,
    resamples: int = 1000,
) -> Float[np.ndarray, "3 k"]:
    """As `intervals.bootstrap`, for statistics that redrawing biases: value, lower and upper.

    The bounds are value + (percentile − mean of the draws) · t/z · √(n/(n−1)), with the quantiles t of Student's
    distribution with n − 1 degrees of freedom and z of the normal one. NaN with one cluster, and without rng.
    """
    value = evaluate(np.ones((1, num_clusters)))[0]
    bounds = np.full((2, len(value)), np.nan)
    if num_clusters > 1 and rng is not None:
        draws = evaluate(rng.multinomial(num_clusters, np.full(num_clusters, 1 / num_clusters), size=resamples))
        known, tail = ~np.isnan(draws).all(0), (1 - confidence) / 2
        factor = t.ppf(1 - tail, num_clusters - 1) / norm.ppf(1 - tail) * np.sqrt(num_clusters / (num_clusters - 1))
        away = np.nanquantile(draws[:, known], [tail, 1 - tail], axis=0) - np.nanmean(draws[:, known], axis=0)
        bounds[:, known] = value[known] + factor * away
    return np.vstack([value, bounds])


def signal_and_noise(
    grams: Float[np.ndarray, "k n n"], *, confidence: float = 0.95
) -> dict[str, Float[np.ndarray, "3 k"]]:
    """gradient_norm, signal and noise of k groups of tokens, from the inner products of n prompts' gradients each.

    Values, then bounds, which only signal has: leave-one-out jackknife, Student's t with n − 1 degrees of freedom, NaN
    for fewer than three prompts. Signal and noise are NaN for one.
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
    if n < 3:
        return out
    # Without prompt p: the sum over pairs of different prompts loses its row and its column.
    diagonal = np.einsum("kpp->kp", grams)
    left = apart[:, None] - 2 * (grams.sum(2) - diagonal)
    signals = n**2 / ((n - 1) * (n - 2)) * left
    error = np.sqrt((n - 1) / n * ((signals - signals.mean(1, keepdims=True)) ** 2).sum(1))
    reach = t.ppf((1 + confidence) / 2, n - 1) * error
    out["signal"][1:] = out["signal"][0] - reach, out["signal"][0] + reach
    return out


def cosine_matrix(pairs: Gram) -> pd.DataFrame:
    """Cosines between the G_a, a row and a column per interval, NaN where there is no gradient."""
    products = pairs.sum((0, 2))
    norms = np.sqrt(np.diag(products))
    with np.errstate(invalid="ignore", divide="ignore"):
        return pd.DataFrame(products / np.outer(norms, norms))


def _ratios(
    pairs: Gram, tokens: Float[np.ndarray, "n A"], draws: Float[np.ndarray, "r n"] | Int[np.ndarray, "r n"]
) -> Float[np.ndarray, "r A4"]:
    """Share, norm ratio, cosine and index of each interval in each draw of prompts."""
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


def _products(pairs: Gram, weights: Float[np.ndarray, "r n"]) -> Float[np.ndarray, "r A A"]:
    """⟨G_a, G_b⟩ of each draw of prompts."""
    size = pairs.shape[1]
    out = np.empty((len(weights), size, size))
    for a in range(size):
        for b in range(a, size):
            out[:, a, b] = out[:, b, a] = ((weights @ pairs[:, a, :, b]) * weights).sum(1)
    return out


def _own_blocks(pairs: Gram) -> Float[np.ndarray, "A n n"]:
    """⟨g_{p,a}, g_{q,a}⟩ of each interval."""
    return np.einsum("paqa->apq", pairs)
