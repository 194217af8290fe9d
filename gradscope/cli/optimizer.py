"""The optimizer state of a checkpoint for a command, with notes for its user."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gradscope.errors import InputError
from gradscope.policy import Policy, read_state
from gradscope.updates import StepSettings, read_moments, state_step


def read_step(
    policy: Policy, path: Path | None, *, asked: bool
) -> tuple[dict[str, Any] | None, StepSettings | None, list[str]]:
    """Return AdamW's state from the file, the step that continues from it, and notes on both.

    asked: whether the user named the file. If it does not fit the policy, it raises InputError; a file that was found
    automatically is ignored instead.
    """
    if path is None:
        return None, None, []
    try:
        state = read_state(path)
        step = state_step(state)
        step.check()
        read_moments(policy.model, step, state)
    except InputError as error:
        if asked:
            raise InputError(error.reason, path=path) from error
        return None, None, [f"{path.name} beside the checkpoint is ignored: {error.reason}"]
    used = "the initial ones" if step.learning_rate is None else f"{step.learning_rate:g}"
    rate = f"the optimizer's learning rate is 0 (the end of its schedule); steps use {used} instead"
    return state, step, [] if any(float(group["lr"]) > 0 for group in state["param_groups"]) else [rate]
