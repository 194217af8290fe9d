"""Compare the engine on a few tokens with plain autograd, one backward pass each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import hypot, inf, isfinite
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from gradscope.errors import InputError, SelfCheckError
from gradscope.gradients.engine.meter import TokenGradientMeter
from gradscope.gradients.engine.recording import block_input
from gradscope.gradients.engine.results import FAST_TOLERANCES, FLOOR, TOLERANCES, SelfCheck, TokenGradients
from gradscope.gradients.engine.stack import SequenceTokens
from gradscope.gradients.graph_memory import recomputing
from gradscope.gradients.hooks import first_tensor
from gradscope.objective import logit_gradient
from gradscope.policy import arithmetic_dtype, float_parameters, takes

PART = 1 << 24
"""Entries of a half-precision gradient widened at a time."""
ALL, SCALED = "all parameters", "scaled"
Key = str | int | tuple[str, str]
"""Name of a norm: a parameter, a layer, or SCALED and a parameter."""
NEAR = 16
"""Tokens this close are assumed to share a chunk, where one could spoil another's norms."""


@dataclass(frozen=True)
class CheckedToken:
    """One token's norms from plain autograd or from the engine."""

    act_grad_norm: list[float]
    """‖δ_ℓ‖ of L + 1 layers."""
    module_grad_norm: dict[str, float]
    """‖g‖ by module that owns parameters; a shared table under its first owner's name."""
    param_grad_norm: float
    scaled_grad_norm: float | None = None
    """‖g ∘ D‖ in the engine's metric; None without one."""


def check_engine(
    meter: TokenGradientMeter,
    sequences: list[SequenceTokens],
    *,
    tolerance: float | None = None,
) -> SelfCheck:
    """Compare the engine with plain autograd on some tokens; call it inside `measuring(policy.model)`.

    sequences: with the tokens to compare as those to measure; the engine measures each with others near it, or else
    with the response token before it, and two sequences of like length together, as it will later.
    Raises SelfCheckError that names the layer or the module that differs most; InputError for a gradient that float16
    cannot hold.
    """
    if tolerance is None:
        tolerance = max(TOLERANCES[arithmetic_dtype(meter.model)], FAST_TOLERANCES.get(meter.precision, 0.0))
    count, largest = 0, 0.0
    for sequence, ours in zip(sequences, _measure_together(meter, sequences), strict=True):
        ids, targets = sequence.ids, sequence.asked.targets
        plain = measure_plainly(meter, ids, targets, temperature=sequence.temperature)
        engine = _read(ours, sequence.measured)
        for own, target, oracle in zip(engine, targets.tolist(), plain, strict=True):
            differences = _compare(own, oracle)
            worst = max(differences, key=differences.__getitem__)
            if arithmetic_dtype(meter.model) == torch.float16 and not isfinite(own.param_grad_norm):
                raise InputError(
                    f"the gradient of token {target} of a sequence of {len(ids)} is beyond float16's "
                    f"{torch.finfo(torch.float16).max:g} at temperature {sequence.temperature:g}, by which it is "
                    "divided; give the temperature that the rollouts were sampled at, or --dtype bfloat16 or float32"
                )
            if not differences[worst] <= tolerance:
                raise SelfCheckError(
                    f"self-check failed at token {target} of a sequence of {len(ids)}: the gradient of "
                    f"{_blame(differences, worst)} differs from plain autograd's by {differences[worst]:.1e} "
                    f"(tolerance {tolerance:.0e}); nothing was measured. Please report the architecture"
                )
            count, largest = count + 1, max(largest, differences[worst])
    return SelfCheck(count, largest, tolerance)


def _measure_together(meter: TokenGradientMeter, sequences: list[SequenceTokens]) -> list[TokenGradients]:
    """Measure each sequence's tokens in groups, two sequences of neighbouring length at once."""
    wider = [_with_company(s) for s in sequences]
    order = sorted(range(len(wider)), key=lambda i: max(wider[i].lengths))
    found: dict[int, TokenGradients] = {}
    for start in range(0, len(order), 2):
        pair = order[start : start + 2]
        found |= zip(pair, meter.measure_together([wider[i] for i in pair]), strict=True)
    return [found[i] for i in range(len(sequences))]


def _with_company(sequence: SequenceTokens) -> SequenceTokens:
    """Add the preceding response token to any token that has no other near it."""
    at, measured = torch.tensor(sequence.lengths), sequence.measured
    near = ((at[:, None] - at).abs() <= NEAR).sum(1) > 1
    alone = measured[~near]
    return replace(sequence, measured=torch.cat([measured, alone - 1]).clamp(min=0).unique())


def _read(found: TokenGradients, tokens: Tensor) -> list[CheckedToken]:
    """Read these tokens from the engine's results, in one copy from the device."""
    scaled = [] if found.scaled_grad_norm is None else [found.scaled_grad_norm]
    norms = [*found.act_grad_norm.T, found.param_grad_norm, *scaled, *found.module_grad_norm.values()]
    rows = torch.stack(norms, 1)[tokens.to(norms[0].device)].double().tolist()
    depth, names = found.act_grad_norm.shape[1], list(found.module_grad_norm)
    return [
        CheckedToken(
            row[:depth],
            dict(zip(names, row[depth + 1 + len(scaled) :], strict=True)),
            row[depth],
            row[depth + 1] if scaled else None,
        )
        for row in rows
    ]


def _compare(ours: CheckedToken, oracle: CheckedToken) -> dict[str, float]:
    """Return the relative difference of each layer's norm, each module's and that of all parameters."""
    layers = zip(ours.act_grad_norm, oracle.act_grad_norm, strict=True)
    out = {f"activations of layer {layer}": _relative(a, b) for layer, (a, b) in enumerate(layers)}
    # A module counts by its part in the whole: the norm of a nearly unused one is rounding.
    whole = max(oracle.param_grad_norm, FLOOR)
    for name, norm in oracle.module_grad_norm.items():
        out[f"module {name or 'the model itself'}"] = abs(ours.module_grad_norm.get(name, 0.0) - norm) / whole
    out[ALL] = _relative(ours.param_grad_norm, oracle.param_grad_norm)
    if ours.scaled_grad_norm is not None:
        out[f"{ALL} in the optimizer's metric"] = _relative(ours.scaled_grad_norm, oracle.scaled_grad_norm)
    # A NaN is no number to compare: it must be the worst, and max() would pass it over.
    return {name: difference if isfinite(difference) else inf for name, difference in out.items()}


def _blame(differences: dict[str, float], worst: str) -> str:
    """Return the name of the worst norm; for the sum over modules, the module that differs most."""
    modules = [name for name in differences if name.startswith("module ")]
    return max(modules, key=differences.__getitem__) if worst == ALL else worst


def measure_plainly(
    meter: TokenGradientMeter, ids: Tensor, targets: Tensor, *, temperature: float
) -> list[CheckedToken]:
    """Compute all gradients of each token's log π by a plain backward pass from the uncancelled e − π, without any
    rule.

    The tokens share one forward pass. A gradient is let go as soon as its norm is known: a parameter's at a time.
    """
    model, parameters = meter.model, dict(float_parameters(meter.model))
    length, handles, norms = int(targets.max()), [], {}
    ids = ids.to(meter.device)

    def take(name: str, parameter: Tensor) -> None:
        norms[name] = _norm(parameter.grad)
        if meter.metric is not None and parameter.grad is not None:
            scale = meter.metric.of(parameter)
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
        blocks = recomputing(model, meter.blocks, length)
        with torch.enable_grad(), _layer_edges(meter) as edges, blocks:
            logits = model(input_ids=ids[None, :length], use_cache=False, **kept).logits
            each = (logits[0] if alone else logits[0, targets - 1]).unbind()
        for layer, edge in enumerate(edges):
            handles.append(edge.node.register_prehook(partial(_take_edge, norms, layer, edge.output_nr)))
        found = []
        for k, own in enumerate(each):
            norms.clear()
            seed = logit_gradient(own, ids[int(targets[k])], temperature=temperature) / temperature
            # A seed with largest entry 1: squares of a sure token's would underflow.
            size = seed.abs().max()
            size = torch.where(size > 0, size, 1.0)
            own.backward((seed / size).to(own.dtype), retain_graph=k + 1 < len(each))
            found.append(_gather(norms, size, len(edges), parameters, scaled=meter.metric is not None))
        return found
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
) -> CheckedToken:
    """Read norms by layer and by parameter in one copy; parameters without a gradient are missing."""
    values = torch.stack([norm.double().to(size.device) for norm in norms.values()])
    known = dict(zip(norms, (size * values).tolist(), strict=True))
    square: dict[str, float] = defaultdict(float)
    for name in parameters:
        square[name.rpartition(".")[0]] += known.get(name, 0.0) ** 2
    modules = {name: value**0.5 for name, value in square.items()}
    act = [known.get(layer, 0.0) for layer in range(layers)]
    whole = hypot(*(known.get((SCALED, name), 0.0) for name in parameters)) if scaled else None
    return CheckedToken(act, modules, sum(square.values()) ** 0.5, whole)


@contextmanager
def _layer_edges(meter: TokenGradientMeter) -> Iterator[list[GradientEdge]]:
    """Yield the graph edges of each layer's activations as passed on, whether later changed in place or not."""
    edges: list[GradientEdge] = []

    def enter(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = block_input(args, kwargs)
        if not hidden.requires_grad:  # The embedding is frozen: the graph starts here.
            hidden.requires_grad_(True)
        edges.append(get_gradient_edge(hidden))

    def leave(_module: Any, _args: Any, output: Any) -> None:
        edges.append(get_gradient_edge(first_tensor(output)))

    handles = [meter.blocks[0].register_forward_pre_hook(enter, with_kwargs=True)]
    handles += [block.register_forward_hook(leave) for block in meter.blocks]
    try:
        yield edges
    finally:
        for handle in handles:
            handle.remove()


def _norm(gradient: Tensor | None) -> Float[Tensor, ""]:
    """Return the norm in float32 at least, part by part, without copying a large gradient."""
    if gradient is None:
        return torch.zeros(())
    wide = torch.promote_types(gradient.dtype, torch.float32)
    if gradient.dtype == wide:
        return gradient.norm()
    parts = gradient.flatten().split(PART)
    return torch.stack([part.to(wide).norm() for part in parts]).norm()


def _relative(ours: float, reference: float) -> float:
    return abs(ours - reference) / max(reference, FLOOR)
