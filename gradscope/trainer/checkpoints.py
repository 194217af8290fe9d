"""Checkpoints of a run: folders that transformers loads, with everything needed to resume to the same results."""

from __future__ import annotations

import json
import random
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from gradscope.errors import InputError, first_line
from gradscope.runs import Journal, refusal, replacing, write_json
from gradscope.trainer.learner import ADAPTER, Learner

CHECKPOINTS, OPTIMIZER, RANDOM_STATES, STATE = "checkpoints", "optimizer.pt", "random_states.pt", "trainer_state.json"
STAY = "the checkpoints before it stay"
CHANGEABLE = ("steps", "epochs", "save_every", "keep_checkpoints", "save_rollouts", "trackers")
"""Settings that may change on resume, since no step's results depend on them."""
DROPPED = ("gradients_every",)
"""Settings of older config.json files, ignored."""


def save_checkpoint(
    out: Path,
    step: int,
    learner: Learner,
    *,
    nonfinite_in_a_row: int = 0,
    keep: int | None = None,
    max_steps: int | None = None,
) -> Path:
    """Write checkpoints/step-000020 under another name, rename it, and keep the newest `keep` (None: all).

    max_steps: of the whole run, to mark its last checkpoint. Raises OSError, in all processes, if it cannot be written;
    earlier checkpoints stay.
    """
    folder = out / CHECKPOINTS / f"step-{step:06d}"
    states = learner.processes.gather([_random_states()])
    state = {"step": step, "max_steps": max_steps, "nonfinite_in_a_row": nonfinite_in_a_row}
    with learner.processes.together():
        if learner.processes.is_main:
            drop_old(out, None)
            try:
                with replacing(folder) as beside:
                    beside.mkdir(parents=True)
                    _write(beside, state, learner, states)
            except OSError as error:
                raise refusal(error, folder, f"go on with --resume; {STAY}") from error
            except (RuntimeError, SafetensorError) as error:
                raise OSError(f"{folder} could not be written ({error}); make room there; {STAY}") from error
            drop_old(out, keep)
    # Saving consumes random numbers; restore the state so saved and resumed runs match.
    _set_random_states(states[learner.processes.rank])
    return folder


def _write(folder: Path, state: dict[str, Any], learner: Learner, random_states: list[dict[str, Any]]) -> None:
    policy, optimizer = learner.policy, learner.optimizer.state_dict()
    weights = {name: weight.cpu() for name, weight in learner.weights()}
    kept = policy.model.state_dict().keys()  # including persistent buffers
    weights |= {name: buffer.cpu() for name, buffer in policy.model.named_buffers() if name in kept}
    policy.model.save_pretrained(folder, state_dict=weights)
    if policy.tokenizer is not None:
        policy.tokenizer.save_pretrained(folder)
    if learner.adapters is not None:
        learner.adapters.save_pretrained(folder / ADAPTER, save_embedding_layers=False)
    moments = {i: {name: value.cpu() for name, value in own.items()} for i, own in optimizer["state"].items()}
    torch.save(optimizer | {"state": moments}, folder / OPTIMIZER)
    torch.save(random_states, folder / RANDOM_STATES)
    write_json(folder / STATE, state)


def restore_checkpoint(folder: Path, learner: Learner) -> int:
    """Restore optimizer and random states; the learner was already built with the weights.

    Returns the number of consecutive steps without a finite gradient at that time.
    """
    learner.optimizer.load_state_dict(torch.load(folder / OPTIMIZER, map_location="cpu", weights_only=True))
    states, rank = torch.load(folder / RANDOM_STATES, weights_only=True), learner.processes.rank
    if rank < len(states):  # the earlier start may have had fewer processes
        _set_random_states(states[rank])
    return json.loads((folder / STATE).read_bytes()).get("nonfinite_in_a_row", 0)


def find_start(journal: Journal, total: int, *, resume: bool, overwrite: bool, tell: bool = True) -> Path | None:
    """Find the checkpoint to resume from; None: start from scratch. Writes nothing.

    tell: report unreadable checkpoints on stderr. Raises InputError if the folder holds an unfinished run that is
    neither resumed nor overwritten, a run with other settings or more steps, or files not written by a training run.
    """
    if resume and overwrite:
        raise InputError("--resume continues and --overwrite starts anew; give one of them")
    if not journal.has_run(overwrite=overwrite, changeable=CHANGEABLE, dropped=DROPPED):
        return None
    newest = newest_whole(journal.out, tell=tell)
    done = 0 if newest is None else step_of(newest)
    if done > total:
        raise InputError(
            f"{journal.out} already holds a run of {done} steps, more than the {total} requested; its last checkpoint "
            f"is {newest}; give {done} steps or more, another --out, or --overwrite"
        )
    if not resume and done < total:
        raise InputError(
            f"{journal.out} holds an unfinished run; give --resume to continue, another --out, or --overwrite"
        )
    return newest


def newest_whole(out: Path, *, tell: bool = True) -> Path | None:
    """Find the newest readable checkpoint, if any. tell: report newer, unreadable ones on stderr."""
    for folder in reversed(list_checkpoints(out)):
        try:
            json.loads((folder / STATE).read_bytes())
            for name in (OPTIMIZER, RANDOM_STATES):
                torch.load(folder / name, map_location="cpu", weights_only=True, mmap=True)
            for file in folder.rglob("*.safetensors"):
                with safe_open(file, "pt"):
                    pass
        except Exception as error:  # a damaged pickle may raise anything
            if tell:
                words = f"{folder} cannot be read ({first_line(error)}); resuming from the one before it"
                print(f"note: {words}", file=sys.stderr)
        else:
            return folder
    return None


def list_checkpoints(out: Path) -> list[Path]:
    """List the run's checkpoints, oldest first."""
    found = [p for p in (out / CHECKPOINTS).glob("step-*") if re.fullmatch(r"step-\d{6,}", p.name)]
    return sorted(found, key=step_of)


def step_of(folder: Path) -> int:
    """Return the training step in a checkpoint's name."""
    return int(folder.name.removeprefix("step-"))


def drop_old(out: Path, keep: int | None) -> None:
    """Delete all checkpoints but the newest `keep` (None: keep all), and leftovers of incomplete ones.

    A folder with a checkpoint's name is always complete.
    """
    try:
        for old in list_checkpoints(out)[:-keep] if keep is not None else []:
            old.rename(old.with_name(f".{old.name}.partial"))
        for left in (out / CHECKPOINTS).glob(".step-*.partial"):
            shutil.rmtree(left)
    except OSError as error:
        raise refusal(error, out / CHECKPOINTS, "go on with --resume") from error


def _random_states() -> dict[str, Any]:
    name, keys, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (name, keys.tolist(), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def _set_random_states(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
