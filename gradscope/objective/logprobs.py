"""What a distribution over tokens says about the sampled one: log π, log(1−π), entropy, at a temperature, uncancelled.

Every number starts from z = (logits − max) / T with the largest entry m set apart: rest = log Σ_{j≠m} exp z_j, so that
the normaliser log(1 + exp rest) keeps a tail far below the rounding of 1. Then, subtracting no nearly equal numbers,

    o = m:  log π = −normaliser             log(1−π) = rest − normaliser
    o ≠ m:  log π = z_o − normaliser        log(1−π) = log1p(−π), where π ≤ ½

Half-precision logits are computed in float32; float64 stays float64. π is the probability at the temperature, always.

For a backward pass it takes as few walks over the logits as it can. At a vocabulary of 32,000, autograd's own way
through `gather_logprobs` costs as much time as the products of the head, most of it in reading and writing arrays as
large as the logits. Here a piece of the logits goes through all steps while the processor's cache holds it, forward and
backward, and of the softmax nothing is kept:

    e_j = exp((z_j − max z) / T)      rest = Σ_{j≠o} e_j      log π = logsigmoid((z_o − max z)/T − log rest)
    ∂ log π / ∂z_j = −π_j / T,  π_j = e_j / (e_o + rest)      ∂ log π / ∂z_o = (1−π) / T,  1−π = rest / (e_o + rest)

Nothing cancels near π = 1, as in `gather_logprobs`, whose numbers these are to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from gradscope.errors import InputError

Number = int | float

CACHED = 2**18
"""Logits that fit a CPU core's cache."""
LAUNCHED = 2**24
"""Logits per part on a GPU, where small parts would be bound by kernel launches; assumed."""

ARGMAX_PART = 64
"""Logits whose largest is found at a time: the fastest of several values at vocabularies of 8,000 to 50,000."""


@dataclass(frozen=True)
class TokenStatistics:
    """What one forward pass says about each sampled token; no gradient flows through these numbers."""

    logprob: Float[Tensor, "*tokens"]
    """log π of the token, nats."""
    log_one_minus_prob: Float[Tensor, "*tokens"]
    """log(1−π), nats: the log of the sum of all other probabilities; −inf where no other token is possible."""
    entropy: Float[Tensor, "*tokens"]
    """Entropy of the whole distribution, nats, with 0·log 0 = 0."""


def rows_at_once(vocab: int, device: str) -> int:
    """Return how many tokens' logits to process together, so that a CPU's cache holds them; device: its type."""
    return max(1, (CACHED if device == "cpu" else LAUNCHED) // vocab)


def parts_at_once(logits: Float[Tensor, "tokens vocab"]) -> Iterator[slice]:
    """Split the tokens into such parts."""
    size = rows_at_once(logits.shape[1], logits.device.type)
    return (slice(start, start + size) for start in range(0, len(logits), size))


@torch.no_grad()
def token_statistics(
    logits: Float[Tensor, "*tokens vocab"],
    token_ids: Int[Tensor, "*tokens"],
    *,
    temperature: Number | Float[Tensor, "*#tokens"] = 1.0,
) -> TokenStatistics:
    """Compute log π, log(1−π) and entropy of every token under softmax(logits / temperature); a −inf logit is
    impossible.

    A tensor of temperatures broadcasts against the tokens.

    >>> stats = token_statistics(torch.tensor([0.0, 40.0]), torch.tensor(1))
    >>> round(stats.log_one_minus_prob.item(), 4)  # 1 − π is 4e-18, where float32 π is 1.0
    -40.0
    """
    shifted, largest, rest, normaliser = _normalise(logits, temperature)
    logprob, log_one_minus_prob = _logprob_and_complement(shifted, largest, rest, normaliser, token_ids)
    probs = (shifted - normaliser.unsqueeze(-1)).exp_()
    # Σ π_j (normaliser − z_j): no term is negative. A finite floor makes that of an impossible token 0 · finite = 0.
    surprise = probs.mul_(shifted.clamp_(min=torch.finfo(shifted.dtype).min)).sum(-1)
    return TokenStatistics(logprob, log_one_minus_prob, normaliser - surprise)


@torch.no_grad()
def logit_gradient(
    logits: Float[Tensor, "*tokens vocab"],
    token_ids: Int[Tensor, "*tokens"],
    *,
    temperature: Number | Float[Tensor, "*#tokens"] = 1.0,
) -> Float[Tensor, "*tokens vocab"]:
    """Compute e − π, the gradient of each token's log π with respect to logits / temperature, without cancellation.

    The token's own entry is the sum of the other probabilities. Divide by the temperature for the gradient with
    respect to the logits themselves.

    >>> logit_gradient(torch.zeros(4), torch.tensor(2))
    tensor([-0.2500, -0.2500,  0.7500, -0.2500])
    """
    shifted, largest, rest, normaliser = _normalise(logits, temperature)
    _, log_one_minus_prob = _logprob_and_complement(shifted, largest, rest, normaliser, token_ids)
    gradient = shifted.sub_(normaliser.unsqueeze(-1)).exp_().neg_()
    return gradient.scatter_(-1, token_ids.unsqueeze(-1), log_one_minus_prob.exp().unsqueeze(-1))


@torch.no_grad()
def statistics_and_gradient(
    logits: Float[Tensor, "*tokens vocab"],
    token_ids: Int[Tensor, "*tokens"],
    *,
    temperature: Number | Float[Tensor, "*#tokens"] = 1.0,
) -> tuple[TokenStatistics, Float[Tensor, "*tokens vocab"]]:
    """Compute `token_statistics` and `logit_gradient` together, in fewer passes over the logits."""
    shifted, largest, rest, normaliser = _normalise(logits, temperature)
    logprob, log_one_minus_prob = _logprob_and_complement(shifted, largest, rest, normaliser, token_ids)
    probs = (shifted - normaliser.unsqueeze(-1)).exp_()
    surprise = shifted.clamp_(min=torch.finfo(shifted.dtype).min).mul_(probs).sum(-1)
    gradient = probs.neg_().scatter_(-1, token_ids.unsqueeze(-1), log_one_minus_prob.exp().unsqueeze(-1))
    return TokenStatistics(logprob, log_one_minus_prob, normaliser - surprise), gradient


def gather_logprobs(
    logits: Float[Tensor, "*tokens vocab"],
    token_ids: Int[Tensor, "*tokens"],
    *,
    temperature: Number | Float[Tensor, "*#tokens"] = 1.0,
) -> Float[Tensor, "*tokens"]:
    """Compute differentiable log π of every token under softmax(logits / temperature), in float32 at least.

    log π = logsigmoid(z_o − log Σ_{j≠o} exp z_j), whose derivative is 1−π by itself: the gradient does not cancel near
    π = 1, as that of log_softmax does. Keeps one copy of the logits for the backward pass. A tensor of temperatures
    broadcasts against the tokens.
    """
    _check_temperature(temperature)
    scale = temperature.unsqueeze(-1) if isinstance(temperature, Tensor) else temperature
    index = token_ids.unsqueeze(-1)
    largest = widen(logits.detach().amax(-1, keepdim=True))
    own = (widen(logits.gather(-1, index)) - largest) / scale
    # Masked by a finite floor, not −inf: where no other token is possible, −inf − (−inf) would make the gradient NaN.
    others = (widen(logits) - largest).div_(scale).scatter(-1, index, torch.finfo(own.dtype).min)
    return F.logsigmoid(own.squeeze(-1) - others.logsumexp(-1))


def _normalise(
    logits: Float[Tensor, "*tokens vocab"], temperature: Number | Float[Tensor, "*#tokens"]
) -> tuple[Float[Tensor, "*tokens vocab"], Int[Tensor, "*tokens"], Float[Tensor, "*tokens"], Float[Tensor, "*tokens"]]:
    """Return z = (logits − max) / T, the index of the max, log Σ exp z over the others, and log Σ exp z over all."""
    _check_temperature(temperature)
    scale = temperature.unsqueeze(-1) if isinstance(temperature, Tensor) else temperature
    largest = _first_largest(logits)
    # Subtract before dividing: the difference of two logits rounds less than the logits / T themselves.
    shifted = (widen(logits) - widen(logits.gather(-1, largest))).div_(scale)
    rest = shifted.scatter(-1, largest, -math.inf).logsumexp(-1)
    return shifted, largest.squeeze(-1), rest, torch.logaddexp(rest, torch.zeros_like(rest))


def _logprob_and_complement(
    shifted: Float[Tensor, "*tokens vocab"],
    largest: Int[Tensor, "*tokens"],
    rest: Float[Tensor, "*tokens"],
    normaliser: Float[Tensor, "*tokens"],
    token_ids: Int[Tensor, "*tokens"],
) -> tuple[Float[Tensor, "*tokens"], Float[Tensor, "*tokens"]]:
    """Return log π and log(1−π) of the sampled tokens, by the two cases of the module's docstring."""
    logprob = shifted.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1) - normaliser
    is_largest = token_ids == largest
    return logprob, torch.where(is_largest, rest - normaliser, torch.log1p(-logprob.exp()))


def _first_largest(logits: Float[Tensor, "*tokens vocab"]) -> Int[Tensor, "*tokens 1"]:
    """Compute `argmax` in parts, since a CPU is slow at it over a whole vocabulary."""
    vocab = logits.shape[-1]
    if vocab < 4 * ARGMAX_PART:
        return logits.argmax(-1, keepdim=True)
    end = vocab - vocab % ARGMAX_PART
    tops = logits[..., :end].unflatten(-1, (-1, ARGMAX_PART)).amax(-1)
    if end < vocab:
        tops = torch.cat([tops, logits[..., end:].amax(-1, keepdim=True)], -1)
    first = ARGMAX_PART * tops.argmax(-1, keepdim=True)
    within = (first + torch.arange(ARGMAX_PART, device=logits.device)).clamp(max=vocab - 1)
    return within.gather(-1, logits.gather(-1, within).argmax(-1, keepdim=True))


def _check_temperature(temperature: Number | Tensor) -> None:
    """Raise InputError unless every temperature is a positive number.

    Those that lie on a device are a batch's, which has looked at them where they came from.
    """
    known = isinstance(temperature, Tensor) and not temperature.is_cpu
    if not known and not (bool((temperature > 0).all()) if isinstance(temperature, Tensor) else temperature > 0):
        raise InputError(f"temperature is {temperature}; probabilities need T > 0; pass the sampling temperature")


def widen(tensor: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return the tensor in at least float32: half precision is upcast, float32 and float64 are unchanged."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def trained_logprobs(
    logits: Float[Tensor, "K N"], token_ids: Int[Tensor, " K"], temperatures: Float[Tensor, " K"]
) -> Float[Tensor, " K"]:
    """Compute log π of each token under softmax(logits / temperature) in nats, in float32 at least, for training.

    For one backward pass; who differentiates forward, or twice, takes `gather_logprobs`. It keeps the logits until
    then. Of a matrix product's logits, which nobody else may use then, the gradient takes the place: fresh memory for
    it would take longer to get than to fill. What else made them might need them for its own gradient; beside such
    logits it gets memory of its own.
    """
    return _TrainedLogprobs.apply(logits, token_ids, temperatures)


class _TrainedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, token_ids: Tensor, temperatures: Tensor) -> Tensor:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        logprobs, largest, own, rest = (logits.new_empty(len(logits), 1, dtype=dtype) for _ in range(4))
        index, scale = token_ids[:, None], temperatures[:, None].to(dtype)
        for part in parts_at_once(logits):
            largest[part] = widen(logits[part].amax(-1, keepdim=True))
            level = (widen(logits[part].gather(-1, index[part])) - largest[part]) / scale[part]
            powers = _powers(logits[part], largest[part], scale[part]).scatter_(-1, index[part], 0.0)
            own[part], rest[part] = level.exp(), powers.sum(-1, keepdim=True)
            logprobs[part] = F.logsigmoid(level - rest[part].log())
        ctx.save_for_backward(logits, index, scale, largest, own, rest)
        ctx.in_place = _is_product(logits)
        return logprobs[:, 0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        logits, index, scale, largest, own, rest = ctx.saved_tensors
        out = logits.detach() if ctx.in_place else torch.empty_like(logits)
        factor = gradient[:, None] / (scale * (own + rest))
        for part in parts_at_once(logits):
            # A slice of `out` where that is wide enough, else a tensor that is copied into it.
            room = out[part] if out.dtype == factor.dtype else None
            slopes = _powers(logits[part], largest[part], scale[part], out=room).mul_(-factor[part])
            slopes.scatter_(-1, index[part], factor[part] * rest[part])
            if room is None:
                out[part] = slopes
        return out, None, None


def _is_product(logits: Tensor) -> bool:
    """Return whether the tensor is a matrix product's output or a view of one, whose gradient needs only its inputs."""
    node = logits.grad_fn
    while node is not None and node.name() in ("ViewBackward0", "UnsafeViewBackward0"):
        node = node.next_functions[0][0]
    return node is not None and node.name() in ("MmBackward0", "AddmmBackward0")


def _powers(
    logits: Float[Tensor, "k N"],
    largest: Float[Tensor, "k 1"],
    scale: Float[Tensor, "k 1"],
    out: Float[Tensor, "k N"] | None = None,
) -> Float[Tensor, "k N"]:
    """Return exp((z − max z) / T)."""
    return torch.sub(widen(logits), largest, out=out).div_(scale).exp_()
