"""The optimizer's state beside a checkpoint, as a command takes it, and what its user must know of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gradscope.errors import InputError
from gradscope.policy import Policy, read_optimizer_file
from gradscope.updates import StepSettings, read_moments, state_step


def read_step(
    policy: Policy, path: Path | None, *, asked: bool
) -> tuple[dict[str, Any] | None, StepSettings | None, list[str]]:
    """(AdamW's state in the file, the step that goes on from it, what a reader must know of the two).

    asked: the user named the file. InputError where it does not fit the policy; another one is then left out.
    """
    if path is None:
        return None, None, []
    try:
        state = read_optimizer_file(path)
        step = state_step(state)
        step.check()
        read_moments(policy.model, step, state)
    except InputError as error:
        if asked:
            raise InputError(error.reason, path=path) from error
        return None, None, [f"{path.name} beside the checkpoint is left out: {error.reason}"]
    return state, step, note_learning_rate(state, step.learning_rate)


def note_learning_rate(state: dict[str, Any], rate: float) -> list[str]:
    """A note where the state's own learning rate is 0, and steps are taken at another."""
    if float(state["param_groups"][0]["lr"]) > 0:
        return []
    return [f"the optimizer's learning rate is 0 (the end of its schedule): steps here are taken at {rate:g}"]
