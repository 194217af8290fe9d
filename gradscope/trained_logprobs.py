"""log π of tokens for one backward pass, in as few walks over the logits as it takes.

At a vocabulary of 32,000, autograd's own way through `gather_logprobs` costs as much time as the products of the head,
most of it in reading and writing arrays as large as the logits. Here a piece of the logits goes through all steps while
the processor's cache holds it, forward and backward, and of the softmax nothing is kept:

    e_j = exp((z_j − max z) / T)      rest = Σ_{j≠o} e_j      log π = logsigmoid((z_o − max z)/T − log rest)
    ∂ log π / ∂z_j = −π_j / T,  π_j = e_j / (e_o + rest)      ∂ log π / ∂z_o = (1−π) / T,  1−π = rest / (e_o + rest)

Nothing cancels near π = 1, as in `gather_logprobs`, whose numbers these are to rounding.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from gradscope.logprobs import parts_at_once, widen


def trained_logprobs(
    logits: Float[Tensor, "K N"], token_ids: Int[Tensor, " K"], temperatures: Float[Tensor, " K"]
) -> Float[Tensor, " K"]:
    """log π of each token under softmax(logits / temperature), in nats: float32 at least.

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
    """Whether autograd sees a matrix product's output, or a view of one: its gradient needs its inputs alone."""
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
    """exp((z − max z) / T)."""
    return torch.sub(widen(logits), largest, out=out).div_(scale).exp_()
