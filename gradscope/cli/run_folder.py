"""Lead from a training run's folder to what lies in it: a checkpoint, and the rollouts that it sampled."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from gradscope.errors import InputError
from gradscope.policy import list_step_folders, model_of_step, named_step, refuse_training_run
from gradscope.rollouts import list_files, list_steps

LOGS = ("gradscope/rollouts", "completions", "rollouts")
"""Folders of rollouts inside a run: RolloutWriter's, TRL's, and the usual name."""


def check_paths(models: Sequence[str], rollouts: Sequence[Path]) -> None:
    """Raise InputError, before anything is loaded, for missing rollouts, and for a run's folder in place of a part."""
    for path in rollouts:
        if os.path.isdir(path) and not _has_files(path) and (log := find_log(path)) is not None:
            raise InputError(f"{path} is a folder without rollouts of its own, but {log} has some; give that")
        list_files(path)
    for model in models:
        refuse_run(model, rollouts[0] if rollouts else None)


def refuse_run(model: str, rollouts: Path | None) -> None:
    """Raise InputError for a run's folder, naming a checkpoint whose rollouts are logged, and where they are."""
    run = Path(model)
    try:
        refuse_training_run(run)
    except InputError:
        folders = {named_step(folder): folder for folder in list_step_folders(run)}
        if not folders:  # a checkpoint with folders for its parts
            raise
    else:
        return
    log = find_log(run) if rollouts is None else rollouts
    step = _logged_step(sorted(folders), log)
    given = model_of_step(folders[step]) or folders[step]
    words = f"{model} is the folder of a training run, not a model; give a checkpoint, such as {given}"
    words += "" if log is None else f", with its rollouts: --rollouts {log}"
    raise InputError(f"{words}. `gradscope diagnose {model} --follow` takes all {len(folders)} of them in turn")


def find_log(run: Path) -> Path | None:
    """Return the folder of rollouts inside a run; None if there is none of a known name."""
    return next((run / name for name in LOGS if (run / name).is_dir() and _has_files(run / name)), None)


def _has_files(folder: Path) -> bool:
    try:
        return bool(list_files(folder))
    except InputError:
        return False


def _logged_step(steps: Sequence[int], log: Path | None) -> int:
    """Return the newest checkpoint whose own rollouts are in the log; without a readable one, the newest of all."""
    try:
        known = None if log is None else list_steps(log)
    except (InputError, OSError):
        known = None
    logged = [step for step in steps if known is not None and known.of_checkpoint(step) in known.known]
    return max(logged or steps)
