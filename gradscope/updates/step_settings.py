"""How a gradient becomes an optimizer step, from scratch or continuing from a saved state."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gradscope.errors import InputError
from gradscope.policy import PART, AdamWState, float_parameters, read_state, value_ranges
from gradscope.runs import scratch_zeros

Number = int | float


@dataclass(frozen=True)
class StepSettings:
    """The optimizer step that a gradient becomes; the defaults are those of the paper's Fig. 1."""

    optimizer: Literal["sgd", "adamw"] = "sgd"
    learning_rate: Number = 1e-3
    weight_decay: Number = 0.0
    """Decoupled weight decay: subtracts learning rate × this × weight."""
    betas: tuple[Number, Number] = (0.9, 0.999)
    """AdamW's β₁ and β₂."""
    eps: Number = 1e-8
    """AdamW's ε."""
    max_grad_norm: Number | None = 1.0
    """Clip the gradient to this norm; None: no clipping."""

    def check(self) -> None:
        """Raise InputError for values out of range."""
        if self.optimizer not in ("sgd", "adamw"):
            raise InputError(f"optimizer is {self.optimizer!r}; give sgd or adamw")
        for name in ("learning_rate", "weight_decay", "eps"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InputError(f"{name} is {getattr(self, name)}; give a finite number, 0 or more")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise InputError(f"betas are {self.betas}; give two numbers from 0 to below 1")
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise InputError(f"max_grad_norm is {self.max_grad_norm}; give a positive number, or None for no clipping")


SGD = StepSettings()
ANY = 1 << 62
"""Bytes for vectors if there is no limit."""


def state_step(state: dict[str, Any]) -> StepSettings:
    """Return the step with which a saved AdamW continues: learning rate, decay, betas and eps of its first group.

    If a schedule has ended with a rate of 0, this uses its initial rate or, if unknown, Fig. 1's. The state does not
    record gradient clipping, so max_grad_norm is the default of StepSettings.
    """
    group = state["param_groups"][0]
    rates = [float(group["lr"]), float(group.get("initial_lr", 0.0)), SGD.learning_rate]
    rate = rates[0] or next(rate for rate in rates if 0 < rate < float("inf"))
    decay, betas = float(group.get("weight_decay", 0.0)), tuple(map(float, group["betas"]))
    return StepSettings("adamw", rate, decay, betas, float(group["eps"]))


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
    """The second moments v and the step counts."""
    first: dict[str, Tensor]
    """The first moments m; parameters without an entry have never been updated, so m = 0."""


class SlicedOptimizer:
    """torch's SGD or AdamW, applied slice by slice, so that it needs little memory besides the gradient.

    Each slice continues from its saved moments. The updated moments are kept in scratch files, if another step will
    follow. The result equals the whole optimizer's, since both optimizers act on each entry separately.
    """

    def __init__(
        self, parameters: dict[str, nn.Parameter], step: StepSettings, moments: Moments | None, num_steps: int
    ) -> None:
        self._parameters, self._settings, self._steps_to_come = parameters, step, num_steps
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
        if self._steps_to_come > 0 and self._settings.optimizer == "adamw":
            kept = {key: scratch_zeros(*values.shape, dtype=values.dtype) for key in ("exp_avg", "exp_avg_sq")}
        length = max(1, PART // max(1, values[:1].numel()))
        for start in range(0, len(values), length):
            own = slice(start, start + length)
            part = nn.Parameter(values[own])
            part.grad = gradient[own]
            optimizer = _make([part], self._settings)
            for key, value in saved.items():
                value = value if key == "step" else value.reshape(values.shape)[own].to(part)
                optimizer.state[part][key] = value.clone()
            optimizer.step()
            for key, whole in kept.items():
                whole[own] = optimizer.state[part][key]
        if kept:
            self._saved[name] = {"step": optimizer.state[part]["step"], **kept}


def _make(parameters: list[nn.Parameter], step: StepSettings) -> torch.optim.Optimizer:
    """Create a torch optimizer for the step."""
    if step.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=step.learning_rate, weight_decay=step.weight_decay)
    settings = {"betas": step.betas, "eps": step.eps, "weight_decay": step.weight_decay}
    return torch.optim.AdamW(parameters, lr=step.learning_rate, **settings)


def read_moments(model: nn.Module, step: StepSettings, state: dict[str, Any] | None) -> Moments | None:
    """Read the moments from AdamW's `state_dict()`, or empty ones, for all float parameters; None for SGD.

    Raises InputError for a state that is not AdamW's, not of this model or not of the step's betas and eps.
    """
    if step.optimizer == "sgd":
        if state is not None:
            raise InputError("optimizer_state is AdamW's, but the optimizer is sgd; give optimizer='adamw'")
        return None
    if state is None:
        zeros = {name: p.new_zeros(()).expand(p.shape) for name, p in float_parameters(model)}
        return Moments(AdamWState(zeros, dict.fromkeys(zeros, 0), step.betas[1], step.eps), {})
    second = AdamWState.from_state_dict(model, state)
    group = state["param_groups"][0]
    saved = tuple(map(float, (*group["betas"], group["eps"])))
    if saved != (wanted := tuple(map(float, (*step.betas, step.eps)))):
        raise InputError(f"the optimizer state has betas and eps {saved}, but the step has {wanted}; give the state's")
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


def make_optimizer(
    model: nn.Module, step: StepSettings, moments: Moments | None, *, sliced_for: int | None = None
) -> torch.optim.Optimizer | SlicedOptimizer:
    """Make the optimizer over the parameters of the moments (all, for SGD); from now on only these get gradients.

    sliced_for: number of steps, to use a `SlicedOptimizer`, which holds no moments in memory.
    """
    parameters = dict(float_parameters(model))
    names = list(parameters if moments is None else moments.second.exp_avg_sq)
    for name, parameter in parameters.items():
        parameter.requires_grad_(name in names)
    if sliced_for is not None:
        return SlicedOptimizer({name: parameters[name] for name in names}, step, moments, sliced_for)
    trained = [parameters[name] for name in names]
    optimizer = _make(trained, step)
    if moments is None:
        return optimizer
    saved = optimizer.state_dict()
    for place, name in enumerate(names):
        if name in moments.first:
            count = torch.tensor(float(moments.second.step[name]))
            pair = {"exp_avg": moments.first[name], "exp_avg_sq": moments.second.exp_avg_sq[name]}
            saved["state"][place] = copy.deepcopy({"step": count, **pair})
    optimizer.load_state_dict(saved)
    return optimizer
