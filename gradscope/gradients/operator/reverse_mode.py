"""wᵀ·J by backward passes: sums of token gradients, whole or one parameter at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call

from gradscope.gradients.frozen import measuring
from gradscope.gradients.operator.forward_mode import KeptNumbers
from gradscope.gradients.operator.vectors import Take
from gradscope.objective import LOGPROB, Quantity
from gradscope.policy import flat_slices, float_parameters, is_upcast
from gradscope.rollouts import TokenBatch


@contextmanager
def differentiable(model: nn.Module, length: int = 0) -> Iterator[None]:
    """Enter `measuring` with gradients enabled for every measured parameter, and restore everything afterwards."""
    with torch.inference_mode(False), torch.enable_grad(), measuring(model, length):
        for _, parameter in float_parameters(model):
            parameter.requires_grad_(True)
        yield


def add_gradients(
    model: nn.Module, logprobs: Float[Tensor, " K"], weights: Float[Tensor, "R K"], sums: Float[Tensor, "R P"]
) -> None:
    """Add Σ_t weights[r, t]·∇ logprobs[t] to row r of `sums`, with a backward pass per nonzero row."""
    slices, parameters = flat_slices(model).values(), [p for _, p in float_parameters(model)]
    active = weights.any(1).nonzero()[:, 0].tolist()
    for r in active:
        last = r == active[-1]
        gradients = torch.autograd.grad(logprobs, parameters, weights[r], retain_graph=not last, allow_unused=True)
        for part, gradient in zip(slices, gradients, strict=True):
            if gradient is not None:
                sums[r, part] += gradient.flatten().to(sums)


def stream_gradients(
    model: nn.Module, piece: TokenBatch, weights: Float[Tensor, "R k"], take: Take, of: Quantity = LOGPROB
) -> None:
    """Pass Σ_t weights[r, t]·∇ log π_t of a piece's kept tokens to `take`, one parameter at a time as they are ready.

    of: the quantity to differentiate.
    """
    # Separate leaves on the same memory: no foreign hooks run, and the model's `.grad` is not touched.
    leaves = {f"model.{name}": p.detach().requires_grad_() for name, p in float_parameters(model)}
    row = 0

    def pass_on(name: str, leaf: Tensor) -> None:
        gradient, leaf.grad = leaf.grad.flatten(), None
        take(row, name, gradient)

    for name, leaf in leaves.items():
        if is_upcast(model):
            leaf.grad_dtype = torch.promote_types(leaf.dtype, torch.float32)
        leaf.register_post_accumulate_grad_hook(partial(pass_on, name.removeprefix("model.")))
    numbers = functional_call(KeptNumbers(model, (of,)), leaves, (piece,))[:, 0]
    weights = weights.to(numbers)
    active = weights.any(1).nonzero()[:, 0].tolist()
    for row in active:  # read by `pass_on`
        numbers.backward(weights[row], retain_graph=row != active[-1], inputs=list(leaves.values()))
