"""Token gradients by one autograd call each, and what a model was like before a call."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gradscope.gradients import Resources, TokenJacobian, Vectors
from gradscope.policy import Policy, flat_slices, float_parameters
from gradscope.rollouts import TokenBatch


def flat_gradient(model: nn.Module, scalar: Tensor) -> Tensor:
    parameters = list(model.parameters())
    found = torch.autograd.grad(scalar, parameters, retain_graph=True, allow_unused=True)
    pairs = zip(parameters, found, strict=True)
    return torch.cat([torch.zeros_like(p).flatten() if g is None else g.flatten() for p, g in pairs])


def token_gradients(policy: Policy, batch: TokenBatch) -> Tensor:
    """∇ log π_t of each kept token, by row and column: one autograd call each on its response alone, [tokens, P]."""
    out = []
    for row in range(len(batch)):
        ids, kept = batch.sequence(row)
        logits = policy.model(input_ids=ids[None], use_cache=False).logits[0] / batch.temperature[row]
        out += [flat_gradient(policy.model, torch.log_softmax(logits[t - 1], -1)[ids[t]]) for t in kept.tolist()]
    return torch.stack(out)


def dense_jacobian(policy: Policy, batch: TokenBatch) -> Tensor:
    """J [K, P] over the measured parameters: one autograd call for each token, over its response alone."""
    parameters, rows = [p for _, p in float_parameters(policy.model)], []
    for response in range(len(batch)):
        ids, kept = batch.sequence(response)
        if not len(kept):
            continue
        logits = policy.model(input_ids=ids[None], use_cache=False).logits[0].double()
        logprobs = torch.log_softmax(logits[kept - 1] / batch.temperature[response], -1)
        for logprob in logprobs.gather(1, ids[kept][:, None])[:, 0]:
            made = torch.autograd.grad(logprob, parameters, retain_graph=True, allow_unused=True)
            flat = [torch.zeros_like(p) if g is None else g for g, p in zip(made, parameters, strict=True)]
            rows.append(torch.cat([g.flatten() for g in flat]))
    return torch.stack(rows)


def used_again(policy: Policy, module: str) -> Policy:
    """The policy with a fault that no forward pass shows: the module's weight acts once more, behind its back.

    Values stay; the gradient of the weight has a part that follows from none of the module's own activations.
    """
    weight = next(policy.model.get_submodule(module).parameters(recurse=False))

    def act(_block: nn.Module, _given: object, found: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        factor = 1 + weight.sum() - weight.sum().detach()
        return found * factor if isinstance(found, Tensor) else (found[0] * factor, *found[1:])

    policy.blocks[0].register_forward_hook(act)
    return policy


def raising(error: Exception) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


def fail_in_the_last_pass(model: nn.Module, call: Callable[[], object]) -> None:
    """Call, and call again with a model that fails in the last forward pass that such a call makes."""
    call()  # what is tried once for each model
    passes: list[int] = []
    handle = model.register_forward_hook(lambda *_: passes.append(1))
    call()
    handle.remove()

    def fail(*_: object) -> None:
        passes.pop()
        if not passes:
            raise ZeroDivisionError

    handle = model.register_forward_hook(fail)
    with pytest.raises(ZeroDivisionError):
        call()
    handle.remove()


class Fused(torch.autograd.Function):
    """An operation without forward mode: it changes nothing, and lets gradients through."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(*_: object) -> None:
        pass

    @staticmethod
    def backward(_context: object, gradient: Tensor) -> Tensor:
        return gradient


def fused(policy: Policy) -> Policy:
    """The policy with such an operation behind its first block."""

    def act(_block: nn.Module, _given: object, found: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        return Fused.apply(found) if isinstance(found, Tensor) else (Fused.apply(found[0]), *found[1:])

    policy.blocks[0].register_forward_hook(act)
    return policy


def bits(tensor: Tensor) -> bytes:
    """What is in memory: −0 is not 0 here, and a NaN is itself."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def snapshot(model: nn.Module) -> dict[str, object]:
    """All that must come back: tensors by identity, place in memory and bits; flags, modes and random states."""
    found: list[object] = []
    for module in model.modules():
        found.append((id(module), module.training, list(module._parameters), list(module._buffers)))
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                found.append((id(tensor), tensor.data_ptr(), tensor.stride(), tensor.dtype, bits(tensor)))
                found.append((tensor.requires_grad, id(tensor.grad), tensor.grad is not None and bits(tensor.grad)))
    numpy = np.random.get_state()
    states = {"torch": bits(torch.get_rng_state()), "numpy": (numpy[1].tobytes(), numpy[2:])}
    return {"model": found, "python": random.getstate(), **states}


def sum_gradients(model: nn.Module, batch: TokenBatch, weights: Tensor, size: int = 8) -> Tensor:
    """[R, P]: Σ_t weights[r, t]·∇ log π_t, from weights [R, B, S]."""
    J = TokenJacobian(model, batch, Resources(1 << 40, micro_batch=size))
    return J.vjp(J.kept(weights)).rows


def predict_changes(model: nn.Module, batch: TokenBatch, directions: Tensor, size: int = 8) -> tuple[Tensor, str]:
    """[R, B, S]: ⟨∇ log π_t, direction⟩, 0 elsewhere; and how."""
    J = TokenJacobian(model, batch, Resources(1 << 40, micro_batch=size))
    changes = J.jvp(Vectors(directions, flat_slices(model)))
    return J.spread(changes.logprob), changes.how
