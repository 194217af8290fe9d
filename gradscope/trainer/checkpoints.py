"""Checkpoints of a run: folders that transformers loads, with all that it takes to go on to the same numbers."""

from __future__ import annotations

import os
import random
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gradscope.errors import InputError
from gradscope.run_folder import write_json
from gradscope.trainer.learner import ADAPTER, Learner

CHECKPOINTS, OPTIMIZER = "checkpoints", "optimizer.pt"


def save_checkpoint(out: Path, step: int, learner: Learner, *, keep: int | None = None) -> Path:
    """Write checkpoints/step-000020 beside and rename it; of the older ones, the newest `keep` − 1 stay."""
    folder = out / CHECKPOINTS / f"step-{step:06d}"
    beside = folder.with_name(f".{folder.name}.partial")
    policy, processes = learner.policy, learner.processes
    weights = dict(learner.weights())  # by all processes: sharded weights are gathered here
    if processes.is_main:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        policy.model.save_pretrained(beside, state_dict={name: w.cpu() for name, w in weights.items()})
        if policy.tokenizer is not None:
            policy.tokenizer.save_pretrained(beside)
        if learner.adapters is not None:
            learner.adapters.save_pretrained(beside / ADAPTER)
        torch.save(learner.optimizer.state_dict(), beside / OPTIMIZER)
        write_json(beside / "trainer_state.json", {"step": step})
    processes.gather([None])  # everybody waits for the folder
    torch.save(_random_states(), beside / f"random_states_{processes.rank}.pt")
    processes.gather([None])
    if processes.is_main:
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(beside, folder)
        for old in list_checkpoints(out)[:-keep] if keep is not None else []:
            shutil.rmtree(old)
    return folder


def restore_checkpoint(folder: Path, learner: Learner) -> None:
    """Optimizer and random states; the weights are those that the learner was built with."""
    device = learner.updater.device
    learner.optimizer.load_state_dict(torch.load(folder / OPTIMIZER, map_location=device, weights_only=True))
    states = folder / f"random_states_{learner.processes.rank}.pt"
    if states.is_file():  # not there for a process that an earlier start did not have
        _set_random_states(torch.load(states, weights_only=True))


def list_checkpoints(out: Path) -> list[Path]:
    """The run's checkpoints, oldest first."""
    return sorted(p for p in (out / CHECKPOINTS).glob("step-*") if re.fullmatch(r"step-\d{6,}", p.name))


def checkpoint_step(folder: Path) -> int:
    """After how many steps it was written."""
    return int(folder.name.removeprefix("step-"))


def check_space(out: Path, learner: Learner) -> None:
    """Raise InputError if the folder cannot be written, OSError if its disk has no room for two checkpoints.

    Two, because a new one is written whole before an old one goes.
    """
    probe = out / CHECKPOINTS / ".probe"
    try:
        probe.parent.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"\0" * 4096)
    except PermissionError as error:
        raise InputError(f"{out} cannot be written ({error.strerror}); give another --out") from error
    finally:
        probe.unlink(missing_ok=True)
    weights = sum(p.numel() for p in learner.policy.model.parameters())
    trained = sum(p.numel() for p in learner.policy.model.parameters() if p.requires_grad)
    needed, free = 2 * 4 * (weights + 2 * trained), shutil.disk_usage(out).free
    if free < needed:
        raise OSError(
            f"the disk of {out} has {free / 2**30:.2f} GiB free and two checkpoints take {needed / 2**30:.2f}; make "
            "room, or give another --out"
        )


def _random_states() -> dict[str, Any]:
    name, keys, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (name, keys.tolist(), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def _set_random_states(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if states["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(states["cuda"])
