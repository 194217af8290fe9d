"""How a gradient becomes an optimizer step, from scratch or continuing from a saved state."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gradscope.errors import InputError
from gradscope.policy import (
    PART,
    RATE,
    AdamWSettings,
    AdamWState,
    float_parameters,
    group_settings,
    read_state,
    value_ranges,
)
from gradscope.runs import scratch_zeros

Number = int | float


@dataclass(frozen=True)
class StepSettings:
    """The optimizer step that a gradient becomes; the defaults are those of the paper's Fig. 1.

    learning_rate, weight_decay, betas and eps are those of every parameter; None, with a saved AdamW: each parameter
    group's own.
    """

    optimizer: Literal["sgd", "adamw"] = "sgd"
    learning_rate: Number | None = RATE
    weight_decay: Number | None = 0.0
    """Decoupled weight decay: subtracts learning rate × this × weight."""
    betas: tuple[Number, Number] | None = (0.9, 0.999)
    """AdamW's β₁ and β₂."""
    eps: Number | None = 1e-8
    """AdamW's ε."""
    max_grad_norm: Number | None = 1.0
    """Clip the gradient to this norm; None: no clipping."""

    def check(self) -> None:
        """Raise InputError for values out of range."""
        if self.optimizer not in ("sgd", "adamw"):
            raise InputError(f"optimizer is {self.optimizer!r}; give sgd or adamw")
        for name in ("learning_rate", "weight_decay", "eps"):
            if (value := getattr(self, name)) is not None and not 0 <= value < math.inf:
                raise InputError(f"{name} is {value}; give a finite number, 0 or more")
        if self.betas is not None and (len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas)):
            raise InputError(f"betas are {self.betas}; give two numbers from 0 to below 1")
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise InputError(f"max_grad_norm is {self.max_grad_norm}; give a positive number, or None for no clipping")

    def of_group(self, saved: AdamWSettings | None) -> AdamWSettings:
        """Return the settings of a parameter's step. saved: its group's; None: there is no saved optimizer.

        Raises InputError for betas or eps unlike those of its moments, and for a setting that is nowhere.
        """
        own = {name: getattr(self, name) for name in GROUP}
        if saved is None:
            if lacking := next((name for name, value in own.items() if value is None), None):
                raise InputError(f"{lacking} is None, and there is no saved AdamW that has one; give a number")
            return AdamWSettings(**own)
        found = replace(saved, **{name: value for name, value in own.items() if value is not None})
        theirs, ours = ([*map(float, (*s.betas, s.eps))] for s in (saved, found))
        if theirs != ours:
            raise InputError(
                f"the optimizer state has betas and eps {theirs}, but the step has {ours}; give the state's"
            )
        return found


GROUP = tuple(field.name for field in fields(AdamWSettings))
"""Settings that may differ between parameter groups."""
SGD = StepSettings()
ANY = 1 << 62
"""Bytes for vectors if there is no limit."""


def state_step(state: dict[str, Any]) -> StepSettings:
    """Return the step with which a saved AdamW continues; None for a setting in which its parameter groups differ.

    If a schedule has ended with a rate of 0, this uses its initial rate or, if unknown, Fig. 1's. The state does not
    record gradient clipping, so max_grad_norm is the default of StepSettings.
    """
    groups = [*group_settings(state).values()]
    values = {name: {getattr(group, name) for group in groups} for name in GROUP}
    return StepSettings("adamw", **{name: own.pop() if len(own) == 1 else None for name, own in values.items()})


def settle_step(
    model: nn.Module, step: StepSettings | None, state: AdamWState | dict[str, Any] | str | Path | None
) -> tuple[StepSettings, dict[str, Any] | None, AdamWState | None]:
    """Return the step to take, the state from which it continues, and the second moments of AdamW's metric.

    step: as requested; None: the state's, else the paper's SGD. state: AdamW's `state_dict()`, or its file, or an
    `AdamWState`, which gives only the metric. Raises InputError for an AdamW state with an SGD step.
    """
    state = read_state(state) if isinstance(state, str | Path) else state
    if not isinstance(state, dict):
        return step or SGD, None, state
    step = step or state_step(state)
    if step.optimizer != "adamw":
        raise InputError("the optimizer state is AdamW's, but settings.step is sgd; give a step of adamw, or none")
    return step, state, AdamWState.from_state_dict(model, state, max_grad_norm=step.max_grad_norm)


@dataclass(frozen=True)
class Moments:
    """AdamW's state by parameter name, in the optimizer's order; other parameters are not trained."""

    second: AdamWState
    """The second moments v, the step counts, and the settings of the step."""
    first: dict[str, Tensor]
    """The first moments m; parameters without an entry have never been updated, so m = 0."""


class StepOptimizer:
    """torch's SGD or AdamW over the parameters of the moments (all, for SGD), applied slice by slice.

    Each slice continues from its saved moments, which stay where they are, so that little memory is needed besides the
    gradient. The result equals that of the whole optimizer, which acts on each entry separately.
    """

    def __init__(
        self, model: nn.Module, step: StepSettings, moments: Moments | None, *, num_steps: int, scratch: bool
    ) -> None:
        """From now on only its parameters get gradients. scratch: keep moments between steps in scratch files."""
        held = dict(float_parameters(model))
        self._parameters = {name: held[name] for name in (held if moments is None else moments.second.exp_avg_sq)}
        for name, parameter in held.items():
            parameter.requires_grad_(name in self._parameters)
        self._settings, self._moments, self._scratch = step, moments, scratch
        self._steps_to_come = num_steps
        self._saved: dict[str, dict[str, Tensor]] = {}
        for name, first in ({} if moments is None else moments.first).items():
            count = torch.tensor(float(moments.second.step[name]))
            self._saved[name] = {"step": count, "exp_avg": first, "exp_avg_sq": moments.second.exp_avg_sq[name]}

    def zero_grad(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None

    def step(self) -> None:
        self._steps_to_come -= 1
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                self._step_one(name, parameter)

    @torch.no_grad()
    def _step_one(self, name: str, parameter: nn.Parameter) -> None:
        values = parameter.data.view(-1) if parameter.is_contiguous() else parameter.data
        gradient, saved = parameter.grad.reshape(values.shape), self._saved.get(name, {})
        kept: dict[str, Tensor] = {}
        if self._steps_to_come > 0 and self._moments is not None:
            make = scratch_zeros if self._scratch else values.new_zeros
            kept = {key: make(*values.shape, dtype=values.dtype) for key in ("exp_avg", "exp_avg_sq")}
        length = max(1, PART // max(1, values[:1].numel()))
        for start in range(0, len(values), length):
            own = slice(start, start + length)
            part = nn.Parameter(values[own])
            part.grad = gradient[own]
            optimizer = self._make(name, part)
            for key, value in saved.items():
                value = value if key == "step" else value.reshape(values.shape)[own].to(part)
                optimizer.state[part][key] = value.clone()
            optimizer.step()
            for key, whole in kept.items():
                whole[own] = optimizer.state[part][key]
        if kept:
            self._saved[name] = {"step": optimizer.state[part]["step"], **kept}

    def _make(self, name: str, part: nn.Parameter) -> torch.optim.Optimizer:
        if self._moments is None:
            return torch.optim.SGD([part], lr=self._settings.learning_rate, weight_decay=self._settings.weight_decay)
        settings = asdict(self._moments.second.settings[name])
        return torch.optim.AdamW([part], lr=settings.pop("learning_rate"), **settings)


def read_moments(model: nn.Module, step: StepSettings, state: dict[str, Any] | None) -> Moments | None:
    """Read the moments from AdamW's `state_dict()`, or empty ones, for all float parameters; None for SGD.

    Raises InputError for a state that is not AdamW's, not of this model or not of the step's betas and eps.
    """
    if step.optimizer == "sgd":
        if state is not None:
            raise InputError("optimizer_state is AdamW's, but the optimizer is sgd; give optimizer='adamw'")
        step.of_group(None)
        return None
    if state is None:
        zeros = {name: p.new_zeros(()).expand(p.shape) for name, p in float_parameters(model)}
        settings = dict.fromkeys(zeros, step.of_group(None))
        return Moments(AdamWState(zeros, dict.fromkeys(zeros, 0), settings), {})
    second = AdamWState.from_state_dict(model, state)
    second = replace(second, settings={name: step.of_group(own) for name, own in second.settings.items()})
    indices = [index for group in state["param_groups"] for index in group["params"]]
    first = {}
    for name, index in zip(second.exp_avg_sq, indices, strict=True):
        if (held := state["state"].get(index)) is None:
            continue
        whole = {"step", "exp_avg", "exp_avg_sq"} <= held.keys()
        if not whole or held["exp_avg"].shape != second.exp_avg_sq[name].shape:
            raise InputError(f"the optimizer state of {name} holds no AdamW moments of its shape; give AdamW's state")
        first[name] = held["exp_avg"]
    for name, ends in value_ranges(first).items():
        if not all(map(math.isfinite, ends)):
            raise InputError(f"exp_avg of {name} is not finite; give the state of a sound run")
    return Moments(second, first)
