"""The optimizer's state beside a checkpoint: found, read without running anything, and mapped to the policy's names."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch

from gradscope.adamw_state import AdamWState, check_structure
from gradscope.checkpoint_files import checkpoint_homes
from gradscope.errors import InputError, unpickling_reason
from gradscope.policy import Policy

OPTIMIZER = "optimizer.pt"
"""What transformers' Trainer, TRL and gradscope's trainer call it, beside the weights."""
KNOWN = {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
"""What AdamW keeps of a parameter; who keeps more is another optimizer."""


def read_adamw_state(
    policy: Policy, path: str | Path | None = None, *, max_grad_norm: int | float | None = None
) -> AdamWState | None:
    """AdamW's second moments for the parameters that are measured, by name; None if nothing was saved for them.

    path: the file, or the folder that holds optimizer.pt; None: the folder of the policy. Then None is also returned
    for an adapter that was merged, whose state is of parameters that the merged model has not.
    max_grad_norm: the run's clipping of the gradient, which no state tells; None: off.

    Raises InputError for a path that is not there, a file that cannot be read or is another optimizer's, and a state
    that does not fit the policy.
    """
    file = find_policy_state(policy) if path is None else find_optimizer_file(path)
    if file is None:
        if path is not None:
            raise InputError(f"{path} is no file and holds no {OPTIMIZER}; give the file of an AdamW state_dict")
        return None
    state = read_optimizer_file(file)
    if path is None and policy.params == "all" and _is_of_an_adapter(state):
        return None
    try:
        return AdamWState.from_state_dict(policy.model, state, max_grad_norm=max_grad_norm)
    except InputError as error:
        raise InputError(f"{file}: {error}") from error


def find_optimizer_file(path: str | Path) -> Path | None:
    """The file itself, or optimizer.pt in a checkpoint's folder (of an `adapter` within one, above it)."""
    path = Path(path)
    if path.is_file():
        return path
    return next((home / OPTIMIZER for home in checkpoint_homes(path) if (home / OPTIMIZER).is_file()), None)


def find_policy_state(policy: Policy) -> Path | None:
    """The file that was saved with a policy; None for an adapter that was merged, whose parameters are gone."""
    merged = policy.base is not None and policy.params == "all"
    return None if merged or not policy.path else find_optimizer_file(policy.path)


def read_optimizer_file(path: Path) -> dict[str, Any]:
    """What `torch.save(optimizer.state_dict(), path)` wrote, for AdamW; nothing in it is executed.

    The tensors stay in the file, mapped: memory holds of them what is being read. Only torch's old format, which cannot
    be mapped, is read as a whole. Who writes into them changes a copy of his own, never the file.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except (RuntimeError, EOFError, pickle.UnpicklingError, LookupError, ValueError, TypeError, OSError) as error:
        raise InputError(
            f"{path} is no file of torch.save that can be read safely ({unpickling_reason(error)}); give an AdamW "
            "state_dict"
        ) from error
    try:
        check_structure(state)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    if extra := sorted({name for moments in state["state"].values() for name in moments} - KNOWN):
        raise InputError(f"{path}: the state holds {extra[0]}, which AdamW does not keep; give the state of an AdamW")
    return state


def _is_of_an_adapter(state: dict[str, Any]) -> bool:
    names = [name for group in state["param_groups"] for name in group.get("param_names", ())]
    return any(".lora_" in name for name in names)
