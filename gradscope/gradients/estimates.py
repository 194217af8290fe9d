"""Token gradient norms by random numbers, where exact ones are too dear: sums by random signs, tokens by forward mode.

Both look at one response at a time and estimate entries of K_st = ⟨g_s, g_t⟩, its token gradients' inner products.

Random signs. With independent z_t = ±1, E‖Σ_{t∈a} z_t g_t‖² = Σ_{t∈a} ‖g_t‖²: the cross terms vanish. A pass is one
backward pass per interval; its variance is 2 Σ_{s≠t∈a} K_st², none at all where the interval has one token.

Forward mode. With v ~ N(0, I) over all parameters, one Jacobian-vector product gives ⟨g_t, v⟩ ~ N(0, ‖g_t‖²) for every
token at once. The mean S of p squares is unbiased for ‖g_t‖², p·S/‖g_t‖² is χ²_p whatever the model, and √S / c_p with
c_p = E χ_p / √p is unbiased for ‖g_t‖ itself. A sum over an interval has the variance 2 Σ_{s,t∈a} K_st² / p.

Each response draws signs and directions of its own, so no inner product of two responses adds to a variance. On eight
responses of the policy embedded-certain one pass then has a relative deviation of .19, .12, .06 and .09 by interval,
one draw .48, .40, .41 and .31 (analyses/benchmarks/estimates.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, lgamma, sqrt

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from gradscope.errors import InputError
from gradscope.gradients.summed.weighted import differentiable, predict_changes, zero_vectors
from gradscope.intervals import EDGES, interval_labels
from gradscope.objective import kept_logprobs, micro_batches
from gradscope.policy import float_parameters
from gradscope.rollouts import TokenBatch

Number = int | float

SUMS = ("interval_square_sum", "interval_weighted_square_sum")
"""Columns of the table that estimates add."""
SUM_ERRORS = tuple(f"{name}_se" for name in SUMS)
"""Those of their standard errors."""


@dataclass(frozen=True)
class EstimateCounts:
    """How many random numbers the estimates are means of."""

    passes: int | None
    """Passes of random signs, for the intervals' sums; None: those come from the draws."""
    draws: int | None
    """Random directions, for every token's own norm; None: no token's own norm is estimated."""


def chi_factor(draws: int) -> float:
    """c_p = E χ_p / √p = √(2/p) Γ((p+1)/2) / Γ(p/2): what the root of a mean of p squared normal numbers tends to.

    >>> round(chi_factor(1), 4)  # E|N(0, 1)| = √(2/π)
    0.7979
    """
    return sqrt(2 / draws) * exp(lgamma((draws + 1) / 2) - lgamma(draws / 2))


def relative_norm_error(draws: int) -> float:
    """Standard error of an estimated ‖g_t‖ over ‖g_t‖, √(1/c_p² − 1): exact for every token and model.

    >>> [round(relative_norm_error(p), 3) for p in (1, 8, 32)]
    [0.756, 0.254, 0.125]
    """
    return sqrt(1 / chi_factor(draws) ** 2 - 1)


def signed_square_norms(
    model: nn.Module,
    response: TokenBatch,
    scales: Float[Tensor, "C m"],
    passes: int,
    generator: torch.Generator,
) -> Float[Tensor, "passes C"]:
    """‖Σ_t z_t · scales[c, t] · g_t‖² over all parameters, in float64 on the CPU; a pass has its own signs z_t = ±1.

    response: a batch of one; its m kept tokens in order. Rows that are all zero cost nothing; all others a backward
    pass each per pass, after one forward pass. Memory besides the model: one gradient.
    """
    [(_, piece)] = micro_batches(response, 1)
    parameters = [p for _, p in float_parameters(model)]
    device = parameters[0].device
    active = [c for c, any_there in enumerate(scales.any(1).tolist()) if any_there]
    out = torch.zeros(passes, len(scales), dtype=torch.float64, device=device)
    with differentiable(model):
        logprobs = kept_logprobs(model, piece)
        for sample in range(passes):
            drawn = torch.randint(2, (len(logprobs),), generator=generator, device=generator.device)
            signs = 2.0 * drawn.to(device) - 1
            for c in active:
                seed = (signs * scales[c].to(signs)).to(logprobs)
                gradients = torch.autograd.grad(logprobs, parameters, seed, retain_graph=True, allow_unused=True)
                out[sample, c] = _square_norm(gradients)
    return out.cpu()


def squared_changes(
    model: nn.Module, response: TokenBatch, draws: int, generator: torch.Generator, *, memory: int = 1 << 30
) -> Float[Tensor, "draws m"]:
    """⟨g_t, v⟩² of the m kept tokens of a response for each v ~ N(0, I) over all parameters; float64, on the CPU.

    memory: bytes that the directions drawn at a time may take; at least one is. Raises InputError where the model has
    no forward mode, for a difference quotient has no digits of a nearly certain token beside those of others, and for
    weights below float32.
    """
    size = zero_vectors(model, 0)
    at_once = max(1, memory // (size.element_size() * size.shape[1]))
    parts = []
    for start in range(0, draws, at_once):
        directions = size.new_empty(min(at_once, draws - start), size.shape[1])
        for direction in directions:  # one by one: how many lie in memory changes no number
            direction.copy_(torch.randn(len(direction), generator=generator, device=generator.device, dtype=size.dtype))
        changes, method = predict_changes(model, response, directions, micro_batch_size=1)
        if method != "forward mode":
            raise InputError(
                "the model has no forward mode, so no token's own norm can be estimated; give --passes alone, or "
                "--norms exact"
            )
        parts.append(changes[:, response.response_mask].double().square())
    return torch.cat(parts)


def estimate_response(
    model: nn.Module,
    response: TokenBatch,
    intervals: Int[Tensor, " m"],
    weights: Float[Tensor, " m"],
    counts: EstimateCounts,
    *,
    seed: Sequence[int],
    memory: int = 1 << 30,
) -> dict[str, Tensor]:
    """The columns of the token table that are estimates, for the m kept tokens of a response (a batch of one).

    `param_grad_norm` and `param_grad_norm_se`: ‖g_t‖ and its standard error; NaN without draws.
    `interval_square_sum`: Σ ‖g_s‖² over the tokens s of this response that share the token's interval, the same number
    for each of them; `interval_weighted_square_sum`: Σ ‖w_s g_s‖², NaN where one of their weights is. Their `…_se`: the
    standard deviation over passes (else draws) divided by the root of their number, NaN if there is one.
    seed: whole numbers ≥ 0 that make this response's random numbers; passes and draws have their own.
    """
    signs, directions = (_generator(model, [*seed, stream]) for stream in (0, 1))
    unknown = torch.full((len(intervals),), float("nan"), dtype=torch.float64)
    out, squares = {"param_grad_norm": unknown, "param_grad_norm_se": unknown}, None
    if counts.draws is not None:
        squares = squared_changes(model, response, counts.draws, directions, memory=memory)
        out["param_grad_norm"] = squares.mean(0).sqrt() / chi_factor(counts.draws)
        out["param_grad_norm_se"] = relative_norm_error(counts.draws) * out["param_grad_norm"]
    values, own = intervals.unique(return_inverse=True)
    members = own == torch.arange(len(values))[:, None]
    weightless = torch.cat([torch.zeros(len(values), dtype=torch.bool), (members & weights.isnan()).any(1)])
    scales = torch.cat([members.double(), members * weights.nan_to_num().double()])
    scales = scales.masked_fill(weightless[:, None], 0.0)
    if counts.passes is not None:
        samples = signed_square_norms(model, response, scales, counts.passes, signs)
    else:
        samples = squares @ scales.square().T
    samples = samples.masked_fill(weightless, float("nan"))
    errors = samples.std(0) / sqrt(len(samples)) if len(samples) > 1 else torch.full_like(samples[0], float("nan"))
    for name, means, error in zip(SUMS, samples.mean(0).chunk(2), errors.chunk(2), strict=True):
        out[name], out[f"{name}_se"] = means[own], error[own]
    return out


def interval_norms(table: pd.DataFrame, *, edges: Sequence[Number] = EDGES) -> pd.DataFrame:
    """What a table of estimates says of the intervals, a row each; NaN where it has no token, or no weight is known.

    interval, label, num_tokens; mean_square: of ‖g_t‖², unbiased; rms_norm: its root (low by about
    mean_square_se² / 8 mean_square^1.5); weighted_square_sum: Σ ‖w_t g_t‖², unbiased; squared_share: its share of all
    intervals'. Each has a standard error, …_se: of the randomness of signs or directions, not of the choice of prompts;
    NaN where every sum is of one sample. Responses are independent, so their squared errors add up. That of
    squared_share is a bound, whatever the correlation of two intervals' errors: forward mode has one v for all.
    """
    if missing := [name for name in SUMS if name not in table]:
        raise InputError(f"the table has no column {missing[0]}; give one that was measured with norms='estimate'")
    each = table.drop_duplicates(["response", "interval"]).groupby("interval")
    rows = range(len(edges) - 1)

    def total(column: str, power: int) -> np.ndarray:
        sums = each[column].apply(lambda v: (v.astype("float64") ** power).sum(skipna=False) ** (1 / power))
        return sums.reindex(rows).to_numpy(dtype=float)

    counts = table["interval"].value_counts().reindex(rows, fill_value=0).to_numpy()
    (square, square_se), (weighted, weighted_se) = (
        (total(name, 1), total(error, 2)) for name, error in zip(SUMS, SUM_ERRORS, strict=True)
    )
    known, others = weighted[counts > 0].sum(), weighted_se[counts > 0].sum()
    with np.errstate(invalid="ignore", divide="ignore"):  # 0/0 where an interval is empty, or every weight is 0
        mean, mean_se, share = square / counts, square_se / counts, weighted / known
        columns = {
            "mean_square": mean,
            "mean_square_se": mean_se,
            "rms_norm": np.sqrt(mean),
            "rms_norm_se": mean_se / (2 * np.sqrt(mean)),
            "weighted_square_sum": weighted,
            "weighted_square_sum_se": weighted_se,
            "squared_share": share,
            "squared_share_se": ((1 - share) * weighted_se + share * (others - weighted_se)) / known,
        }
    names = {"interval": list(rows), "label": interval_labels(edges), "num_tokens": counts}
    return pd.DataFrame(names | columns)


def _square_norm(gradients: Sequence[Tensor | None]) -> Float[Tensor, ""]:
    """In float64: the squares of a nearly certain token's gradient are below float32."""
    norms = [torch.linalg.vector_norm(g, dtype=torch.float64) for g in gradients if g is not None]
    return torch.stack(norms).square().sum()


def _generator(model: nn.Module, seed: Sequence[int]) -> torch.Generator:
    """A generator on the model's device."""
    (state,) = np.random.SeedSequence(list(seed)).generate_state(1, np.uint64)
    # torch takes seeds up to 2⁶⁴ − 1 but stores them signed on some devices.
    return torch.Generator(next(model.parameters()).device).manual_seed(int(state) >> 1)
