"""Token gradient norms by plain autograd, one backward pass per token.

The reference for the self-check, and the fallback for sequences whose graph would not fit into memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import hypot
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from gradscope.gradients.budget.graph_memory import recomputing
from gradscope.gradients.engine.metric import Metric
from gradscope.gradients.engine.recording import block_input
from gradscope.gradients.hooks import first_tensor
from gradscope.objective import LOGPROB, Given, Outputs, Quantity, given_at, make_ready
from gradscope.policy import float_parameters, takes

PART = 1 << 24
"""Entries of a half-precision gradient widened at a time."""
SCALED = "scaled"
Key = str | int | tuple[str, str]
"""Key of a norm: a parameter's name, a layer, or (SCALED, parameter)."""


@dataclass(frozen=True)
class TokenNorms:
    """One token's norms, from plain autograd or the engine."""

    act_grad_norm: list[float]
    """‖δ_ℓ‖ for L + 1 layers."""
    module_grad_norm: dict[str, float]
    """‖g‖ by module that owns parameters; a shared table counts for its first owner."""
    param_grad_norm: float
    scaled_grad_norm: float | None = None
    """‖g ∘ D‖ in the engine's metric; None without one."""


def measure_plainly(
    model: nn.Module,
    blocks: nn.ModuleList,
    ids: Int[Tensor, " n"],
    targets: Int[Tensor, " m"],
    *,
    temperature: float,
    candidates: Given = (),
    metric: Metric | None = None,
    of: Quantity = LOGPROB,
) -> Iterator[TokenNorms]:
    """Compute all gradients of each token's quantity by a plain backward pass from the uncancelled slope at the logits.

    The tokens share one forward pass, which keeps only the blocks' inputs if its graph would not fit. Gradients are
    freed parameter by parameter, as soon as their norms are known.
    """
    parameters, device = dict(float_parameters(model)), next(model.parameters()).device
    length, handles, norms = int(targets.max()), [], {}
    ids = ids.to(device)

    def take(name: str, parameter: Tensor) -> None:
        norms[name] = _norm(parameter.grad)
        if metric is not None and parameter.grad is not None:
            scale = metric.of(parameter)
            norms[SCALED, name] = _norm(parameter.grad.to(scale) * scale)
        parameter.grad = None

    alone = takes(model, "logits_to_keep")
    kept = {"logits_to_keep": (targets - 1).to(ids.device)} if alone else {}
    before = {name: parameter.grad for name, parameter in parameters.items()}
    try:
        for name, parameter in parameters.items():
            parameter.requires_grad_(True)
            parameter.grad = None
            handles.append(parameter.register_post_accumulate_grad_hook(partial(take, name)))
        with torch.enable_grad(), _layer_edges(blocks) as edges, recomputing(model, blocks, length):
            logits = model(input_ids=ids[None, :length], use_cache=False, **kept).logits
            each = (logits[0] if alone else logits[0, targets - 1]).unbind()
        for layer, edge in enumerate(edges):
            handles.append(edge.node.register_prehook(partial(_take_edge, norms, layer, edge.output_nr)))
        beside = given_at(of, ids[None, :length], (targets - 1).to(device), candidates)
        for k, own in enumerate(each):
            norms.clear()
            given = make_ready(of, tuple(values[k : k + 1] for values in beside), own)
            (seed,) = of.evaluate(Outputs(own.detach()[None], ids[targets[k : k + 1]], temperature, given)).slope
            seed = seed / temperature
            # A seed with largest entry 1: squares would underflow as π → 1.
            size = seed.abs().max()
            size = torch.where(size > 0, size, 1.0)
            own.backward((seed / size).to(own.dtype), retain_graph=k + 1 < len(each))
            yield _gather(norms, size, len(edges), parameters, scaled=metric is not None)
    finally:
        for handle in handles:
            handle.remove()
        for name, parameter in parameters.items():
            parameter.requires_grad_(False)
            parameter.grad = before[name]


def _take_edge(norms: dict[Key, Tensor], layer: int, output: int, gradients: tuple[Tensor | None, ...]) -> None:
    norms[layer] = _norm(gradients[output])


def _gather(
    norms: dict[Key, Tensor], size: Tensor, layers: int, parameters: Iterable[str], *, scaled: bool
) -> TokenNorms:
    """Read norms by layer and parameter in one copy from the device; parameters without a gradient are missing."""
    values = torch.stack([norm.double().to(size.device) for norm in norms.values()])
    known = dict(zip(norms, (size * values).tolist(), strict=True))
    square: dict[str, float] = defaultdict(float)
    for name in parameters:
        square[name.rpartition(".")[0]] += known.get(name, 0.0) ** 2
    modules = {name: value**0.5 for name, value in square.items()}
    act = [known.get(layer, 0.0) for layer in range(layers)]
    whole = hypot(*(known.get((SCALED, name), 0.0) for name in parameters)) if scaled else None
    return TokenNorms(act, modules, sum(square.values()) ** 0.5, whole)


@contextmanager
def _layer_edges(blocks: nn.ModuleList) -> Iterator[list[GradientEdge]]:
    """Yield the graph edges of each layer's activations as returned, even if later modified in place."""
    edges: list[GradientEdge] = []

    def enter(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = block_input(args, kwargs)
        if not hidden.requires_grad:  # The embedding is frozen: the graph starts here.
            hidden.requires_grad_(True)
        edges.append(get_gradient_edge(hidden))

    def leave(_module: Any, _args: Any, output: Any) -> None:
        edges.append(get_gradient_edge(first_tensor(output)))

    handles = [blocks[0].register_forward_pre_hook(enter, with_kwargs=True)]
    handles += [block.register_forward_hook(leave) for block in blocks]
    try:
        yield edges
    finally:
        for handle in handles:
            handle.remove()


def _norm(gradient: Tensor | None) -> Float[Tensor, ""]:
    """Return the norm in float32 or wider, in parts, without copying a large gradient."""
    if gradient is None:
        return torch.zeros(())
    wide = torch.promote_types(gradient.dtype, torch.float32)
    if gradient.dtype == wide:
        return gradient.norm()
    parts = gradient.flatten().split(PART)
    return torch.stack([part.to(wide).norm() for part in parts]).norm()
