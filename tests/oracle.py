"""The plainest measurement there is: one autograd call per token on a float64 copy of the model, with no rule at all."""

from __future__ import annotations

import copy
from collections import defaultdict
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradscope.logprobs import logit_gradient
from gradscope.models import Policy


@dataclass(frozen=True)
class Truth:
    """Norms of the token gradients of m tokens of one sequence, in float64."""

    logprob: Tensor
    """log π, [m]."""
    prob_of_others: Tensor
    """1 − π, [m]."""
    logits: Tensor
    """‖e − π‖, [m]."""
    layers: Tensor
    """‖δ_ℓ‖ of the input of the first block and the output of every block, over all positions, [m, L + 1]."""
    parameters: Tensor
    """‖g‖ over all parameters, shared ones once, [m]."""
    modules: dict[str, Tensor]
    """‖g‖ by the module that owns the parameters (the first one, if several do), [m] each."""


def in_float64(policy: Policy) -> Policy:
    """A float64 copy of the policy: the same weights, digit by digit."""
    return replace(policy, model=copy.deepcopy(policy.model).double())


def brute_force(policy: Policy, ids: Tensor, targets: Tensor, *, temperature: float = 1.0, seed: str = "e-pi") -> Truth:
    """One backward pass per token through one forward over the whole sequence; nothing is cut, batched or chunked.

    seed="e-pi": what flows into the logits is e − π, with 1−π the sum of the other probabilities. seed="log_softmax":
    plain autograd from log_softmax, which cancels near π = 1.
    """
    model = policy.model
    hidden: list[Tensor] = []
    handles = [policy.blocks[0].register_forward_pre_hook(lambda m, a, k: hidden.append(_first(a, k)), with_kwargs=True)]
    handles += [b.register_forward_hook(lambda m, a, out: hidden.append(_first(out))) for b in policy.blocks]
    parameters = dict(model.named_parameters())
    flags = {name: p.requires_grad for name, p in parameters.items()}
    try:
        for p in parameters.values():
            p.requires_grad_(True)
        with torch.enable_grad():
            logits = model(input_ids=ids[None], use_cache=False).logits[0, targets - 1]
            logprobs = (logits / temperature).log_softmax(-1)[torch.arange(len(targets)), ids[targets]]
        seeds = logit_gradient(logits, ids[targets], temperature=temperature)
        rows = []
        for k in range(len(targets)):
            start = (logprobs[k],) if seed == "log_softmax" else (logits[k], [*hidden, *parameters.values()])
            if seed == "log_softmax":
                grads = torch.autograd.grad(logprobs[k], [*hidden, *parameters.values()], retain_graph=True, allow_unused=True)
            else:
                grads = torch.autograd.grad(*start, seeds[k] / temperature, retain_graph=True, allow_unused=True)
            rows.append(torch.stack([logits.new_zeros(()) if g is None else g.square().sum() for g in grads]))
    finally:
        for handle in handles:
            handle.remove()
        for name, p in parameters.items():
            p.requires_grad_(flags[name])
    squares = torch.stack(rows)
    layers, own = squares[:, : len(hidden)], squares[:, len(hidden) :]
    modules: dict[str, Tensor] = defaultdict(lambda: torch.zeros(len(targets), dtype=own.dtype))
    for name, column in zip(parameters, own.T, strict=True):
        modules[name.rpartition(".")[0]] += column
    return Truth(
        logprobs.detach(),
        -torch.expm1(logprobs.detach()),
        seeds.norm(dim=1),
        layers.sqrt(),
        own.sum(1).sqrt(),
        {name: square.sqrt() for name, square in modules.items()},
    )
