"""Before the engine is believed: a few tokens again by plain autograd, one vector-Jacobian product each."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradscope.capture.hooks import first_tensor, forward_hooks
from gradscope.capture.token_gradients import TokenGradientMeter
from gradscope.errors import SelfCheckError
from gradscope.logprobs import logit_gradient

TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 0.05}
"""Largest relative difference of a norm that rounding explains, by dtype: float64 allows for the float32 casts inside
transformers' modules; half precisions round every product of a long chain."""


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
    meter: TokenGradientMeter, tokens: list[tuple[Tensor, int]], *, temperature: list[float], tolerance: float | None = None
) -> SelfCheck:
    """Compare the engine with plain autograd on some tokens; call it inside `measuring(policy.model)`.

    tokens: (unpadded ids [n], index of the response token in it). temperature: one a token.
    Raises SelfCheckError that names the layer or the module that differs most.
    """
    if tolerance is None:
        tolerance = TOLERANCES[meter.model.dtype]
    largest = 0.0
    for (ids, target), t in zip(tokens, temperature, strict=True):
        oracle = measure_plainly(meter, ids, target, temperature=t)
        index = torch.tensor([target], device=ids.device)
        ours = meter.measure(ids, index, torch.arange(1), temperature=t)
        modules = {name: norm.item() for name, norm in ours.module_grad_norm.items()}
        rows = [
            *((f"activations of layer {i}", a, b) for i, (a, b) in enumerate(zip(ours.act_grad_norm[0].tolist(), oracle.act_grad_norm.tolist(), strict=True))),
            ("all parameters", ours.param_grad_norm.item(), oracle.param_grad_norm),
        ]  # fmt: skip
        # A module counts by its part in the whole: the norm of a nearly unused one is rounding.
        whole = oracle.param_grad_norm or 1.0
        part = {name: abs(modules.get(name, 0.0) - norm) / whole for name, norm in oracle.module_grad_norm.items()}
        differences = {name: _relative(a, b) for name, a, b in rows} | {f"module {n}": d for n, d in part.items()}
        worst = max(differences, key=differences.__getitem__)
        if not differences[worst] <= tolerance:
            named = max(part, key=part.__getitem__) if worst == "all parameters" else worst
            raise SelfCheckError(
                f"self-check failed at token {target} of a sequence of {len(ids)}: the gradient of {named} differs from "
                f"plain autograd's by {differences[worst]:.1e} (tolerance {tolerance:.0e}); nothing was measured. "
                "Please report the architecture"
            )
        largest = max(largest, differences[worst])
    return SelfCheck(len(tokens), largest, tolerance)


def measure_plainly(meter: TokenGradientMeter, ids: Tensor, target: int, *, temperature: float) -> CheckedToken:
    """All gradients of one token's log π by one plain backward pass from the uncancelled e − π, with no rule at all."""
    model, names = meter.model, {id(m): name for name, m in meter.model.named_modules()}
    hidden: list[Tensor] = []

    def root(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden.append(args[0] if args else kwargs["hidden_states"])

    def record(_name: str, _module: Any, _args: Any, _kwargs: Any, output: Any) -> None:
        hidden.append(first_tensor(output))

    parameters = dict(model.named_parameters())
    handle = meter.blocks[0].register_forward_pre_hook(root, with_kwargs=True)
    try:
        for parameter in parameters.values():
            parameter.requires_grad_(True)
        with torch.enable_grad(), forward_hooks(model, [names[id(b)] for b in meter.blocks], record):
            logits = model(input_ids=ids[None, :target], use_cache=False).logits[0, -1]
        seed = logit_gradient(logits, ids[target], temperature=temperature) / temperature
        gradients = torch.autograd.grad(
            logits, [*hidden, *parameters.values()], seed.to(logits.dtype), allow_unused=True
        )
    finally:
        handle.remove()
        for parameter in parameters.values():
            parameter.requires_grad_(False)
    act = torch.stack([_norm(g) for g in gradients[: len(hidden)]])
    square: dict[str, float] = defaultdict(float)
    for name, gradient in zip(parameters, gradients[len(hidden) :], strict=True):
        square[name.rpartition(".")[0]] += 0.0 if gradient is None else _norm(gradient).item() ** 2
    modules = {name: value**0.5 for name, value in square.items()}
    return CheckedToken(act, modules, sum(square.values()) ** 0.5)


def _norm(gradient: Tensor | None) -> Tensor:
    return torch.zeros(()) if gradient is None else gradient.to(torch.promote_types(gradient.dtype, torch.float32)).norm()


def _relative(ours: float, reference: float) -> float:
    return abs(ours - reference) / reference if reference else abs(ours)
