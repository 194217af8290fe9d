"""The plainest measurement there is: one autograd call per token, on a float64 copy of the model, with no rules."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from gradscope.gradients import TokenGradientMeter, measuring
from gradscope.gradients.engine.results import TokenGradients
from gradscope.objective import logit_gradient
from gradscope.policy import Policy, find_blocks
from gradscope.rollouts import TokenBatch


@dataclass(frozen=True)
class Truth:
    """Norms of the token gradients of m tokens of one sequence."""

    logprob: Tensor
    """log π, [m]."""
    logits: Tensor
    """‖e − π‖, [m]."""
    layers: Tensor
    """‖δ_ℓ‖ of the input of the first block and the output of every block, over all positions, [m, L + 1]."""
    parameters: Tensor
    """‖g‖ over all parameters, shared ones once, [m]."""
    modules: dict[str, Tensor]
    """‖g‖ by the module that owns the parameters (the first one, if several do), [m] each."""


def brute_force(
    policy: Policy, ids: Tensor, targets: Tensor, *, temperature: float = 1.0, cancelling: bool = False
) -> Truth:
    """One backward pass per token through one forward over the whole sequence; nothing is cut, batched or chunked.

    cancelling=True: plain autograd from log_softmax, where e − π loses the digits of 1 near π = 1.
    """
    parameters = dict(policy.model.named_parameters())
    flags = [(p, p.requires_grad) for p in parameters.values()]
    try:
        for p in parameters.values():
            p.requires_grad_(True)
        with torch.enable_grad(), _hidden_edges(policy) as hidden:
            logits = policy.model(input_ids=ids[None], use_cache=False).logits[0, targets - 1]
        logprobs = (logits / temperature).log_softmax(-1)[torch.arange(len(targets)), ids[targets]]
        errors = logit_gradient(logits, ids[targets], temperature=temperature)
        starts = [
            (logprobs[k], None) if cancelling else (logits[k], errors[k] / temperature) for k in range(len(targets))
        ]
        squares = torch.stack([_square_norms(*start, [*hidden, *parameters.values()]) for start in starts])
    finally:
        for p, flag in flags:
            p.requires_grad_(flag)
    layers, own = squares.split([len(hidden), len(parameters)], dim=1)
    modules: dict[str, Tensor] = defaultdict(lambda: torch.zeros_like(own[:, 0]))
    for name, square in zip(parameters, own.T, strict=True):
        modules[name.rpartition(".")[0]] += square
    norms = {name: square.sqrt() for name, square in modules.items()}
    return Truth(logprobs.detach(), errors.norm(dim=1), layers.sqrt(), own.sum(1).sqrt(), norms)


def _square_norms(output: Tensor, seed: Tensor | None, wanted: list[Tensor | GradientEdge]) -> Tensor:
    gradients = torch.autograd.grad(output, wanted, seed, retain_graph=True, allow_unused=True)
    return torch.stack([output.new_zeros(()) if g is None else g.square().sum() for g in gradients])


@contextmanager
def _hidden_edges(policy: Policy) -> Iterator[list[GradientEdge]]:
    """Where the values stand in the graph as they were passed, even if they are changed in place later."""
    edges: list[GradientEdge] = []

    def enter(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        edges.append(get_gradient_edge(args[0] if args else kwargs["hidden_states"]))

    def leave(_module: nn.Module, _args: Any, output: Any) -> None:
        edges.append(get_gradient_edge(output if isinstance(output, Tensor) else output[0]))

    handles = [policy.blocks[0].register_forward_pre_hook(enter, with_kwargs=True)]
    handles += [block.register_forward_hook(leave) for block in policy.blocks]
    try:
        yield edges
    finally:
        for handle in handles:
            handle.remove()


class TrueFloat64(TorchFunctionMode):
    """A context in which float32 means float64: transformers' norms, softmax and rotations cast to float32 inside."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            return args[0].double()
        # Called for every attribute of every tensor: most have neither keywords nor a type among their arguments.
        for value in args:
            if value is torch.float32:
                args = tuple(torch.float64 if value is torch.float32 else value for value in args)
                break
        if not kwargs:
            return func(*args)
        return func(*args, **{n: torch.float64 if value is torch.float32 else value for n, value in kwargs.items()})


def in_float64(policy: Policy) -> Policy:
    """A copy with the same weights, digit by digit."""
    return replace(policy, model=copy.deepcopy(policy.model).double())


def as_policy(model: nn.Module, blocks: str | None = None) -> Policy:
    """A policy of a model made in memory, in eval mode."""
    return Policy(model.eval(), None, find_blocks(model, blocks))


def sequences(batch: TokenBatch) -> list[tuple[Tensor, Tensor, float]]:
    """(ids, targets, temperature) of every response of the batch that keeps a token."""
    rows = [(*batch.sequence(row), float(batch.temperature[row])) for row in range(len(batch))]
    return [row for row in rows if len(row[1])]


def measure_all(
    policy: Policy,
    ids: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    measured: Tensor | None = None,
    probe_ids: Tensor | None = None,
    **settings: int | bool | str,
) -> TokenGradients:
    """The engine on one sequence, made for it alone; every target is measured unless said otherwise."""
    with measuring(policy.model):
        meter = TokenGradientMeter(policy, ids if probe_ids is None else probe_ids, **settings)
        picks = torch.arange(len(targets)) if measured is None else measured
        return meter.measure(ids, targets, picks, temperature=temperature)


def largest_error(ours: TokenGradients, truth: Truth) -> float:
    """Largest relative difference over tokens, of every layer, of all parameters and of each module.

    A module's is relative to its own norm and a hundredth of the whole: that of a key's bias is zero but for rounding.
    """
    pairs = [
        (ours.logit_grad_norm, truth.logits, 0.0),
        (ours.act_grad_norm, truth.layers, 0.0),
        (ours.param_grad_norm, truth.parameters, 0.0),
    ]
    for name in truth.modules.keys() | ours.module_grad_norm.keys():
        expected = truth.modules[name]
        pairs.append((ours.module_grad_norm.get(name, torch.zeros_like(expected)), expected, truth.parameters / 100))
    # nan.max() is nan, so a norm that was never filled in fails every comparison.
    errors = [((a.double() - b.double()).abs() / (b.double() + slack)).max() for a, b, slack in pairs]
    return torch.stack(errors).max().item()
