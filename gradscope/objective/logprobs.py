"""log π, log(1−π) and entropy of sampled tokens at a temperature, without cancellation.

Everything starts from z = (logits − max) / T with the largest entry m set apart: rest = log Σ_{j≠m} exp z_j, so that
the normaliser log(1 + exp rest) keeps a tail far below the rounding of 1. Then, without subtracting nearly equal
numbers,

    o = m:  log π = −normaliser             log(1−π) = rest − normaliser
    o ≠ m:  log π = z_o − normaliser        log(1−π) = log1p(−π), where π ≤ ½

Half-precision logits are upcast to float32; float64 stays float64. π is always the probability at the temperature.

For training, the backward pass reads the logits as few times as possible. At a vocabulary of 32,000, autograd through
`gather_logprobs` takes as long as the head's matrix products, mostly for reading and writing arrays of the logits'
size. `trained_logprobs` instead takes a cache-sized part of the logits through all steps, forward and backward, and
stores no softmax:

    e_j = exp((z_j − max z) / T)      rest = Σ_{j≠o} e_j      log π = logsigmoid((z_o − max z)/T − log rest)
    ∂ log π / ∂z_j = −π_j / T,  π_j = e_j / (e_o + rest)      ∂ log π / ∂z_o = (1−π) / T,  1−π = rest / (e_o + rest)

As in `gather_logprobs`, with which it agrees up to rounding, nothing cancels near π = 1.
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
"""Logits that fit into a CPU core's cache."""
LAUNCHED = 2**24
"""Logits per part on a GPU, where small parts would be bound by kernel launches; assumed."""

ARGMAX_PART = 64
"""Logits per part in argmax: the fastest of several values for vocabularies of 8,000 to 50,000."""


@dataclass(frozen=True)
class TokenStatistics:
    """Statistics of each sampled token from one forward pass, detached."""

    logprob: Float[Tensor, "*tokens"]
    """log π of the token, nats."""
    log_one_minus_prob: Float[Tensor, "*tokens"]
    """log(1−π), nats: log of the sum of all other probabilities; −inf if no other token is possible."""
    entropy: Float[Tensor, "*tokens"]
    """Entropy of the whole distribution, nats, with 0·log 0 = 0."""


def rows_at_once(vocab: int, device: str) -> int:
    """Return how many tokens' logits to process together, to fit into a CPU's cache; device: its type."""
    return max(1, (CACHED if device == "cpu" else LAUNCHED) // vocab)


def parts_at_once(logits: Float[Tensor, "tokens vocab"]) -> Iterator[slice]:
    """Split the tokens into parts of `rows_at_once`."""
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
    shifted, largest, rest, normaliser = normalise(logits, temperature)
    logprob, log_one_minus_prob = _logprob_and_complement(shifted, largest, rest, normaliser, token_ids)
    probs = (shifted - normaliser.unsqueeze(-1)).exp_()
    # Σ π_j (normaliser − z_j) has no negative terms. With a finite floor, impossible tokens add 0 · finite = 0.
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

    The sampled token's entry is the sum of the other probabilities. Divide by the temperature for the gradient with
    respect to the logits themselves.

    >>> logit_gradient(torch.zeros(4), torch.tensor(2))
    tensor([-0.2500, -0.2500,  0.7500, -0.2500])
    """
    shifted, largest, rest, normaliser = normalise(logits, temperature)
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
    shifted, largest, rest, normaliser = normalise(logits, temperature)
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

    log π = logsigmoid(z_o − log Σ_{j≠o} exp z_j) has the derivative 1−π directly, so the gradient does not cancel near
    π = 1 as that of log_softmax does. Keeps one copy of the logits for the backward pass. A tensor of temperatures
    broadcasts against the tokens.
    """
    _check_temperature(temperature)
    scale = temperature.unsqueeze(-1) if isinstance(temperature, Tensor) else temperature
    index = token_ids.unsqueeze(-1)
    largest = widen(logits.detach().amax(-1, keepdim=True))
    own = (widen(logits.gather(-1, index)) - largest) / scale
    # Mask with a finite floor, not −inf: if no other token is possible, −inf − (−inf) would make the gradient NaN.
    others = (widen(logits) - largest).div_(scale).scatter(-1, index, torch.finfo(own.dtype).min)
    return F.logsigmoid(own.squeeze(-1) - others.logsumexp(-1))


def normalise(
    logits: Float[Tensor, "*tokens vocab"], temperature: Number | Float[Tensor, "*#tokens"]
) -> tuple[Float[Tensor, "*tokens vocab"], Int[Tensor, "*tokens"], Float[Tensor, "*tokens"], Float[Tensor, "*tokens"]]:
    """Return z = (logits − max) / T, the index of the max, log Σ exp z over the others, and log Σ exp z over all."""
    _check_temperature(temperature)
    scale = temperature.unsqueeze(-1) if isinstance(temperature, Tensor) else temperature
    largest = _first_largest(logits)
    # Subtract before dividing, which rounds less.
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
    """Return log π and log(1−π) of the sampled tokens, by the two cases in the module's docstring."""
    logprob = shifted.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1) - normaliser
    is_largest = token_ids == largest
    return logprob, torch.where(is_largest, rest - normaliser, torch.log1p(-logprob.exp()))


def _first_largest(logits: Float[Tensor, "*tokens vocab"]) -> Int[Tensor, "*tokens 1"]:
    """Compute argmax in parts, since it is slow over a whole vocabulary on a CPU."""
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
    """Raise InputError unless every temperature is positive; tensors on a device were checked by their batch."""
    known = isinstance(temperature, Tensor) and not temperature.is_cpu
    if not known and not (bool((temperature > 0).all()) if isinstance(temperature, Tensor) else temperature > 0):
        raise InputError(f"temperature is {temperature}; probabilities need T > 0; pass the sampling temperature")


def widen(tensor: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Upcast half precision to float32; leave float32 and float64 unchanged."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def trained_logprobs(
    logits: Float[Tensor, "K N"], token_ids: Int[Tensor, " K"], temperatures: Float[Tensor, " K"]
) -> Float[Tensor, " K"]:
    """Compute log π of each token under softmax(logits / temperature) in nats, in float32 at least, for training.

    Supports one backward pass; for forward mode or second derivatives use `gather_logprobs`. If the logits come
    straight from a matrix product, the gradient overwrites them, which is faster than fresh memory, so nothing else may
    use them. Other logits may be needed for their own gradient, and are left unchanged.
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
            # A slice of `out` if that is wide enough, else a tensor to copy into it.
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
