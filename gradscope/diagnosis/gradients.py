"""The summed gradients of intervals, prompt by prompt: shares with intervals, signal against noise, AdamW's metric.

g_{p,a} is prompt p's part of G_a, the gradient of the loss over the tokens of interval a; G = Σ_a G_a. All numbers are
inner products ⟨g_{p,a}, g_{q,b}⟩, one matrix [n·A, n·A], so that prompts can be redrawn without another backward pass.
Memory besides the model: n·A vectors as long as the parameters or, where that is over the budget, as a slice of them or
as their sketches (`summed.prompts`). What sketches add to the error of shares, ratios, cosines with G, indices
and signals is in their bounds; norms, noise and the cosines between intervals have none.

**Shares, cosines and indices** have bounds from redrawn prompts. A redrawn batch has about twice the noise, which lifts
squared norms and pulls shares towards those of the noise: so the percentiles are moved by the bootstrap's own bias, and
widened as Student's t and the n/(n−1) of a variance ask at few prompts, and as a jackknife does (see
`centred_bootstrap`).
**Signal** is the unbiased estimate of ‖E G_a‖², n/(n−1)·(‖G_a‖² − Σ_p ‖g_{p,a}‖²), where prompts are draws of one
distribution; it may be negative. **Noise** is that of E‖G_a − E G_a‖², so that signal + noise = ‖G_a‖² exactly; and the
**signal fraction**, signal/‖G_a‖², is what the cosine with the G_a of another such batch is to be expected near. The
bounds of these two are a jackknife over prompts with Student's t (a redrawn batch counts a prompt with itself, which
biases a squared norm); the fraction's are signal's over this batch's ‖G_a‖².
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from gradscope.diagnosis.result import join_rows, make_rows
from gradscope.gradients import PromptGradients, SumsPlan, Way, fixed_cotangents, gram, own_rows, zero_vectors
from gradscope.policy import AdamWState, Policy, square_norm
from gradscope.resampling import Seed, centred_bootstrap, jackknife_error, short_of
from gradscope.rollouts import TokenBatch
from gradscope.runs import ALONE, Processes, Progress

Gram = Float[np.ndarray, "n A n A"]

SLICE = 1 << 21
"""Numbers that are widened to float64 at a time."""


@dataclass(frozen=True)
class Products:
    """Inner products of all g_{p,a}, in float64."""

    pairs: Gram
    blocks: tuple[Gram, ...] = ()
    """With sketches, what each block of their coordinates adds to the pairs."""

    def error(self, statistic: Callable[[Gram], Float[np.ndarray, "*shape"]]) -> Float[np.ndarray, "*shape"]:
        """Standard error that sketches give a statistic of the pairs; 0 of exact ones."""
        return jackknife_error(statistic, self.blocks) if self.blocks else np.zeros_like(statistic(self.pairs))


@dataclass(frozen=True)
class SummedGradients:
    """What the vectors g_{p,a} of one batch say."""

    raw: Products
    plan: SumsPlan
    """How they were made."""
    adamw: Products | None = None
    totals: Float[Tensor, "A P"] | None = None
    """G_a, where the vectors are whole."""
    squares: Float[np.ndarray, "n A"] | None = None
    """Σ_t ‖w_t g_t‖² of each prompt and interval in AdamW's metric, estimated by random signs."""


def sum_gradients(
    policy: Policy,
    batch: TokenBatch,
    cotangents: Float[Tensor, "A B S"],
    *,
    metric: AdamWState | None = None,
    sign_passes: int | None = None,
    memory: int,
    way: Way | None = None,
    micro_batch_size: int,
    generator: torch.Generator,
    processes: Processes = ALONE,
    progress: bool | Progress = False,
) -> SummedGradients:
    """All inner products of g_{p,a} = Σ_t cotangents[a, t]·∇ log π_t over prompt p's tokens; raw and in AdamW's metric.

    sign_passes: passes for Σ_t ‖w_t g_t‖² in AdamW's metric, ‖Σ_t z_t·w_t·g_t‖² with random signs z_t = ±1, which has
    that mean; None: it is not estimated. memory, way: see `summed.prompts`. processes: share the prompts; the result
    is everybody's. The policy is as it was.
    """
    size = len(cotangents)
    passes = {"memory": memory, "micro_batch_size": micro_batch_size, "processes": processes, "progress": progress}
    passes |= {"metric": metric is not None, "rows": size}

    def make(cotangents: Float[Tensor, "A B S"], held: int, way: Way | None) -> PromptGradients:
        return PromptGradients(policy, batch, fixed_cotangents(cotangents), held=held, way=way, **passes)

    prompts = own_rows(batch)
    source = make(cotangents, len(prompts) * size, way)
    totals = None if metric is None else source.new_totals()
    raw, vectors = _multiply(source, totals=totals)
    whole = vectors.sum(0) if source.plan.way == "whole" else None
    if metric is None:
        return SummedGradients(raw, source.plan, totals=whole)
    scale = metric.turn_into_scale(policy.model, totals[0])
    if source.plan.way == "whole":
        adamw = Products(block_products(vectors.mul_(scale.to(vectors))))
    else:
        vectors = None  # the last part's make room
        adamw, _ = _multiply(source, scale=scale)
    del vectors
    if sign_passes is None:
        return SummedGradients(raw, source.plan, adamw, whole)
    signs = torch.zeros(sign_passes, *cotangents.shape[1:], dtype=cotangents.dtype)
    for rows in prompts:
        for draw in signs:
            draw[rows] = (2.0 * torch.randint(2, cotangents[0, rows].shape, generator=generator) - 1).to(draw)
    squares = np.zeros((len(prompts), size))
    for draw in signs:
        for _, found in make(cotangents * draw, 0, source.plan.way).parts(scale=scale):
            for prompt, signed in found:
                squares[prompt] += [square_norm(vector) / sign_passes for vector in signed]
    return SummedGradients(raw, source.plan, adamw, whole, processes.sum(torch.from_numpy(squares)).numpy())


def prompt_vectors(
    policy: Policy, batch: TokenBatch, cotangents: Float[Tensor, "A B S"], *, micro_batch_size: int
) -> Float[Tensor, "n A P"]:
    """All g_{p,a} of a small policy themselves."""
    everything = {"held": 0, "memory": 1 << 62, "way": "whole"}
    own = fixed_cotangents(cotangents)
    source = PromptGradients(policy, batch, own, rows=len(cotangents), micro_batch_size=micro_batch_size, **everything)
    return torch.stack([found.clone() for _, vectors in source.parts() for _, found in vectors])


def _multiply(source: PromptGradients, **scaled: Tensor | None) -> tuple[Products, Tensor]:
    """The inner products, and the vectors of the last part."""
    pairs, blocks, kept = 0.0, (), None
    for part, vectors in source.parts(**scaled):
        del kept  # before the next part's
        kept = zero_vectors(source.model, 0).new_zeros(source.num_prompts, source.rows, part.size)
        for prompt, found in vectors:
            kept[prompt] = found
        source.processes.sum(kept)
        if source.plan.sketch_size is not None:
            blocks = tuple(block_products(block) for block in kept.chunk(source.plan.blocks, dim=2))
            pairs = sum(blocks)
        else:
            pairs = pairs + block_products(kept)
    return Products(pairs, blocks), kept


def block_products(vectors: Float[Tensor, "n A P"]) -> Gram:
    """⟨g_{p,a}, g_{q,b}⟩ in float64, in slices of the parameters that are small beside the vectors."""
    n, size, length = vectors.shape
    width = max(1, min(length, SLICE // (n * size)))
    found = sum(gram(part) for part in vectors.flatten(0, 1).split(width, dim=1))
    return found.numpy().reshape(n, size, n, size)


def gradient_rows(
    products: Products,
    tokens: Float[np.ndarray, "n A"],
    labels: Sequence[str],
    *,
    metric: str,
    seed: Seed = 0,
    confidence: float = 0.95,
    resamples: int = 1000,
) -> pd.DataFrame:
    """Rows per interval and for "all": see the module for what they are and what their bounds mean.

    gradient_norm, ‖G_a‖ (no bounds); gradient_share, ⟨G_a, G⟩/‖G‖²; norm_ratio, ‖G_a‖/‖G‖; cosine_with_all, of G_a and
    G; gradient_index, log₂ of its share of Σ_b ‖G_b‖² over its share of the tokens; signal, noise, signal_fraction.
    tokens: counts by block and interval. NaN where an interval has no token or no gradient, bounds with one block.
    """
    size, pairs, everyone = len(labels), products.pairs, np.ones((1, len(tokens)))
    settings = {"seed": seed, "confidence": confidence, "resamples": resamples}
    found = centred_bootstrap(lambda draws: _ratios(pairs, tokens, draws), len(pairs), **settings)
    error = products.error(lambda pairs: _ratios(pairs, tokens, everyone)[0])
    found = _widen(found, error, confidence).reshape(3, 4, size)
    found[:, 1], found[:, 2] = np.maximum(found[:, 1], 0.0), np.clip(found[:, 2], -1.0, 1.0)
    counts = tokens.sum(0)
    found = np.where(counts > 0, found, np.nan)
    served = (np.einsum("kpp->kp", _own_blocks(pairs)) > 0).sum(1)  # prompts with a gradient there, and at all
    lacking = [short_of(prompts) for prompts in served]
    short = [] if seed is None else lacking[:-1]
    common = {"metric": metric, "intervals": labels, "short": short}
    parts = [
        make_rows("gradient_share", found[:, 0], counts, unit="share", **common),
        make_rows("norm_ratio", found[:, 1], counts, unit="ratio", **common),
        make_rows("cosine_with_all", found[:, 2], counts, unit="cosine", **common),
        make_rows("gradient_index", found[:, 3], counts, unit="bits", **common),
    ]
    everything = {"metric": metric, "intervals": [*labels, "all"]}
    short = lacking
    numbers = signal_and_noise(_own_blocks(pairs), confidence=confidence)
    error = products.error(lambda pairs: signal_and_noise(_own_blocks(pairs))["signal"][0])
    numbers["signal"] = _widen(numbers["signal"], error, confidence)
    counts = np.append(counts, counts.sum())
    for name, unit in (("gradient_norm", "norm"), ("signal", "squared"), ("noise", "squared")):
        own = {} if name == "gradient_norm" else {"short": short}
        parts.append(
            make_rows(name, np.where(counts > 0, numbers[name], np.nan), counts, unit=unit, **everything, **own)
        )
    with np.errstate(invalid="ignore", divide="ignore"):
        fraction = numbers["signal"] / numbers["gradient_norm"][0] ** 2
    # Noise is a variance, so that no signal exceeds the whole.
    fraction = np.where(counts > 0, np.minimum(fraction, 1.0), np.nan)
    return join_rows([*parts, make_rows("signal_fraction", fraction, counts, unit="share", **everything, short=short)])


def signal_and_noise(
    grams: Float[np.ndarray, "k n n"], *, confidence: float = 0.95
) -> dict[str, Float[np.ndarray, "3 k"]]:
    """gradient_norm, signal and noise of k groups of tokens, from the inner products of n prompts' gradients each.

    Values, then bounds, which only signal has: leave-one-out jackknife, Student's t with n − 1 degrees of freedom, NaN
    for too few prompts. Signal and noise are NaN for one.
    """
    from scipy.stats import t

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


def _own_blocks(pairs: Gram) -> Float[np.ndarray, "A1 n n"]:
    """⟨g_{p,a}, g_{q,a}⟩ of each interval and, last, of all together."""
    return np.concatenate([np.einsum("paqa->apq", pairs), pairs.sum((1, 3))[None]])


def _widen(
    found: Float[np.ndarray, "3 k"], error: Float[np.ndarray, " k"], confidence: float
) -> Float[np.ndarray, "3 k"]:
    """Value and bounds, those farther out by an error that is independent of what they are for."""
    from scipy.stats import norm

    value, reach = found[0], norm.ppf((1 + confidence) / 2) * error
    lower, upper = (np.hypot(found[side] - value, reach) for side in (1, 2))
    return np.stack([value, value - lower, value + upper]) if error.any() else found
