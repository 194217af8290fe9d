"""A step's gradient from what its run has kept: AdamW's moments before and after, or the gradient after clipping."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from torch import Tensor

from gradscope.errors import InputError
from gradscope.policy import Policy, group_settings, optimizer_names, read_state
from gradscope.updates.auditing.products import FLOAT32


def gradient_of_moments(policy: Policy, before: str | Path | None, after: str | Path) -> dict[str, Tensor]:
    """Recover a step's gradient, after clipping, from AdamW's first moments before and after it.

    From m′ = β₁·m + (1 − β₁)·g; float64 tensors by the policy's names.

    Args:
        before: AdamW's state_dict, or its checkpoint, before the step; None: the run's first step.
        after: The same after the step.

    Raises:
        InputError: the states are not one step apart, or are not AdamW's.
    """
    new, old = read_state(after), None if before is None else read_state(before)
    names, settings, found = optimizer_names(policy.model, new), group_settings(new), {}
    if len(names) != len(settings):
        raise InputError(
            f"the optimizer state has {len(settings)} parameters, but the policy {len(names)}; give the state of the "
            "run that trained these parameters (an adapter's: --params adapter)"
        )
    for name, (index, own) in zip(names, settings.items(), strict=True):
        if (moments := new["state"].get(index)) is None:
            continue
        beta = own.betas[0]
        held = {} if old is None else old["state"].get(index, {})
        steps = int(moments["step"]) - int(held.get("step", 0))
        if steps != 1:
            raise InputError(
                f"the two optimizer states are {steps} steps apart at {name}, but a gradient can be recovered only "
                "between consecutive steps; give consecutive checkpoints"
            )
        first = moments["exp_avg"].double()
        found[name] = (first - beta * held["exp_avg"].double() if held else first) / (1 - beta)
    return found


def undo_clip(gradient: Mapping[str, Tensor], grad_norm: int | float) -> tuple[dict[str, Tensor], float]:
    """Return the gradient before clipping, and the factor that clipping applied; 1 if it was not clipped.

    Args:
        gradient: After clipping, by parameter name.
        grad_norm: Norm before clipping, as logged by the trainer.
    """
    norm = float(np.sqrt(sum(float(own.double().square().sum()) for own in gradient.values())))
    factor = norm / grad_norm
    if not 0 < factor < 1 - FLOAT32:
        return dict(gradient), 1.0
    return {name: own / factor for name, own in gradient.items()}, factor
