"""Before the engine is believed: a few tokens again by plain autograd, one vector-Jacobian product each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import inf, isfinite
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from gradscope.capture.hooks import first_tensor
from gradscope.capture.recording import block_input
from gradscope.capture.stack import SequenceTokens
from gradscope.capture.token_gradients import TokenGradientMeter, TokenGradients
from gradscope.errors import InputError, SelfCheckError
from gradscope.logprobs import logit_gradient
from gradscope.parameters import float_parameters

TOLERANCES = {torch.float64: 1e-4, torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 0.05}
"""Largest relative difference of a norm that rounding explains, by dtype: float64 allows for the float32 casts inside
transformers' modules; half precisions round every product of a long chain, and prefixes of another length otherwise."""

FAST_TOLERANCES = {"bfloat16": 0.05, "tf32": 0.01}
"""The same where factors are rounded to 8 or 11 bits before every product of the backward pass."""

FLOOR = 1e-30
"""A norm below it counts as one of this size: float32 has no digits left there."""
ALL = "all parameters"


@dataclass(frozen=True)
class CheckedToken:
    """One token as plain autograd measures it."""

    act_grad_norm: Tensor
    """‖δ_ℓ‖, [L + 1]."""
    module_grad_norm: dict[str, float]
    """‖g‖ by module that owns parameters; a shared table under its first owner's name."""
    param_grad_norm: float


@dataclass(frozen=True)
class SelfCheck:
    """How far the engine was from plain autograd on the tokens that were compared."""

    tokens: int
    largest_difference: float
    """Relative, over every layer and the norm of all parameters."""
    tolerance: float


def check_engine(
    meter: TokenGradientMeter,
    sequences: list[SequenceTokens],
    *,
    tolerance: float | None = None,
) -> SelfCheck:
    """Compare the engine with plain autograd on some tokens; call it inside `measuring(policy.model)`.

    sequences: with the tokens to compare as those to measure; the engine measures each with the response token before
    it, and two sequences of like length together, as it will later.
    Raises SelfCheckError that names the layer or the module that differs most; InputError for a gradient that float16
    cannot hold.
    """
    if tolerance is None:
        tolerance = max(TOLERANCES[meter.model.dtype], FAST_TOLERANCES.get(meter.precision, 0.0))
    count, largest = 0, 0.0
    for sequence, ours in zip(sequences, _measure_together(meter, sequences), strict=True):
        ids, targets = sequence.ids, sequence.targets
        for k in sequence.measured.tolist():
            oracle = measure_plainly(meter, ids, int(targets[k]), temperature=sequence.temperature)
            differences = _compare(ours, k, oracle)
            worst = max(differences, key=differences.__getitem__)
            if meter.model.dtype == torch.float16 and not ours.param_grad_norm[k].isfinite():
                raise InputError(
                    f"the gradient of token {int(targets[k])} of a sequence of {len(ids)} is beyond float16's "
                    f"{torch.finfo(torch.float16).max:g} at temperature {sequence.temperature:g}; give --dtype "
                    "bfloat16 or float32"
                )
            if not differences[worst] <= tolerance:
                raise SelfCheckError(
                    f"self-check failed at token {int(targets[k])} of a sequence of {len(ids)}: the gradient of "
                    f"{_blame(differences, worst)} differs from plain autograd's by {differences[worst]:.1e} "
                    f"(tolerance {tolerance:.0e}); nothing was measured. Please report the architecture"
                )
            count, largest = count + 1, max(largest, differences[worst])
    return SelfCheck(count, largest, tolerance)


def _measure_together(meter: TokenGradientMeter, sequences: list[SequenceTokens]) -> list[TokenGradients]:
    """Each sequence's tokens and those before them; neighbours in length together, two at once."""
    wider = [replace(s, measured=torch.cat([s.measured, s.measured - 1]).clamp(min=0).unique()) for s in sequences]
    order = sorted(range(len(wider)), key=lambda i: wider[i].reach)
    found: dict[int, TokenGradients] = {}
    for start in range(0, len(order), 2):
        pair = order[start : start + 2]
        found |= zip(pair, meter.measure_together([wider[i] for i in pair]), strict=True)
    return [found[i] for i in range(len(sequences))]


def _compare(ours: TokenGradients, k: int, oracle: CheckedToken) -> dict[str, float]:
    """Relative difference of each layer's norm, of each module's and of all parameters'."""
    layers = zip(ours.act_grad_norm[k].tolist(), oracle.act_grad_norm.tolist(), strict=True)
    out = {f"activations of layer {layer}": _relative(a, b) for layer, (a, b) in enumerate(layers)}
    # A module counts by its part in the whole: the norm of a nearly unused one is rounding.
    whole = max(oracle.param_grad_norm, FLOOR)
    measured = {name: norms[k].item() for name, norms in ours.module_grad_norm.items()}
    for name, norm in oracle.module_grad_norm.items():
        out[f"module {name or 'the model itself'}"] = abs(measured.get(name, 0.0) - norm) / whole
    out[ALL] = _relative(ours.param_grad_norm[k].item(), oracle.param_grad_norm)
    # A NaN is no number to compare: it must be the worst, and max() would pass it over.
    return {name: difference if isfinite(difference) else inf for name, difference in out.items()}


def _blame(differences: dict[str, float], worst: str) -> str:
    """The worst by name; where that is the sum over modules, the module that differs most."""
    modules = [name for name in differences if name.startswith("module ")]
    return max(modules, key=differences.__getitem__) if worst == ALL else worst


def measure_plainly(meter: TokenGradientMeter, ids: Tensor, target: int, *, temperature: float) -> CheckedToken:
    """All gradients of one token's log π by one plain backward pass from the uncancelled e − π, with no rule at all."""
    model, parameters = meter.model, dict(float_parameters(meter.model))
    try:
        for parameter in parameters.values():
            parameter.requires_grad_(True)
        with torch.enable_grad(), _layer_edges(meter) as edges:
            logits = model(input_ids=ids[None, :target], use_cache=False).logits[0, -1]
            seed = logit_gradient(logits, ids[target], temperature=temperature) / temperature
            # A seed with largest entry 1: squares of a sure token's would underflow.
            size = seed.abs().max().item() or 1.0
            gradients = torch.autograd.grad(
                logits, [*edges, *parameters.values()], (seed / size).to(logits.dtype), allow_unused=True
            )
    finally:
        for parameter in parameters.values():
            parameter.requires_grad_(False)
    norms = [size * _norm(gradient) for gradient in gradients]
    square: dict[str, float] = defaultdict(float)
    for name, norm in zip(parameters, norms[len(edges) :], strict=True):
        square[name.rpartition(".")[0]] += norm**2
    modules = {name: value**0.5 for name, value in square.items()}
    return CheckedToken(torch.tensor(norms[: len(edges)]), modules, sum(square.values()) ** 0.5)


@contextmanager
def _layer_edges(meter: TokenGradientMeter) -> Iterator[list[GradientEdge]]:
    """Where each layer's activations stand in the graph as they were passed, changed in place later or not."""
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


def _norm(gradient: Tensor | None) -> float:
    return 0.0 if gradient is None else gradient.to(torch.promote_types(gradient.dtype, torch.float32)).norm().item()


def _relative(ours: float, reference: float) -> float:
    return abs(ours - reference) / max(reference, FLOOR)
