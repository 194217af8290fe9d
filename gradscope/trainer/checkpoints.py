"""Checkpoints of a run: folders that transformers loads, with all that it takes to go on to the same numbers."""

from __future__ import annotations

import json
import random
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gradscope.errors import first_line
from gradscope.runs import refusal, replacing, write_json
from gradscope.trainer.adapters import ADAPTER
from gradscope.trainer.learner import Learner

CHECKPOINTS, OPTIMIZER, RANDOM_STATES, STATE = "checkpoints", "optimizer.pt", "random_states.pt", "trainer_state.json"
STAY = "the checkpoints before it stay"


def save_checkpoint(
    out: Path, step: int, learner: Learner, *, nonfinite_in_a_row: int = 0, keep: int | None = None
) -> Path:
    """Write checkpoints/step-000020 beside and rename it; of the older ones, the newest `keep` − 1 stay.

    Raises OSError if it cannot be written, in all processes; what there was before stays.
    """
    folder = out / CHECKPOINTS / f"step-{step:06d}"
    content = _gather(learner)
    with learner.processes.together():
        if learner.processes.is_main:
            drop_unfinished(out)
            try:
                with replacing(folder) as beside:
                    beside.mkdir(parents=True)
                    _write(beside, {"step": step, "nonfinite_in_a_row": nonfinite_in_a_row}, learner, content)
            except OSError as error:
                raise refusal(error, folder, f"go on with --resume; {STAY}") from error
            except (RuntimeError, SafetensorError) as error:
                raise OSError(f"{folder} could not be written ({error}); make room there; {STAY}") from error
            drop_old(out, keep)
    # Writing draws random numbers of its own; this run goes on from where a resumed one will.
    _set_random_states(content.random_states[learner.processes.rank])
    return folder


def restore_checkpoint(folder: Path, learner: Learner) -> int:
    """Optimizer and random states; the weights are those that the learner was built with.

    Returns how many optimizer steps in a row had no finite gradient when it was written.
    """
    _restore(folder, learner)
    return json.loads((folder / STATE).read_bytes()).get("nonfinite_in_a_row", 0)


def _restore(folder: Path, learner: Learner) -> None:
    saved = torch.load(folder / OPTIMIZER, map_location="cpu", weights_only=True)
    learner.optimizer.load_state_dict(saved)
    states, rank = torch.load(folder / RANDOM_STATES, weights_only=True), learner.processes.rank
    if rank < len(states):  # an earlier start may have had fewer processes
        _set_random_states(states[rank])


def list_checkpoints(out: Path) -> list[Path]:
    """The run's checkpoints, oldest first."""
    found = [p for p in (out / CHECKPOINTS).glob("step-*") if re.fullmatch(r"step-\d{6,}", p.name)]
    return sorted(found, key=step_of)


def newest_whole(out: Path, *, tell: bool = True) -> Path | None:
    """The newest checkpoint that can be read; None: there is none. tell: of each newer one, a line on stderr."""
    for folder in reversed(list_checkpoints(out)):
        try:
            json.loads((folder / STATE).read_bytes())
            for name in (OPTIMIZER, RANDOM_STATES):
                torch.load(folder / name, map_location="cpu", weights_only=True, mmap=True)
            for file in folder.rglob("*.safetensors"):
                with safe_open(file, "pt"):
                    pass
        except Exception as error:  # what a damaged pickle raises is anything
            if tell:
                words = f"{folder} cannot be read ({first_line(error)}); the run goes on from the one before it"
                print(f"note: {words}", file=sys.stderr)
        else:
            return folder
    return None


def step_of(folder: Path) -> int:
    """How many steps a run had made when it wrote this checkpoint, by the folder's name."""
    return int(folder.name.removeprefix("step-"))


@dataclass(frozen=True)
class _Content:
    """What a checkpoint holds, whole and on the CPU; in all processes but the main one, nothing."""

    weights: dict[str, Tensor]
    optimizer: dict[str, Any]
    random_states: list[dict[str, Any]]


def _gather(learner: Learner) -> _Content:
    """By all processes together: each has random states of its own."""
    is_main = learner.processes.is_main

    def keep(tensor: Tensor) -> Tensor | None:
        return tensor.cpu() if is_main else None

    weights = {name: keep(weight) for name, weight in learner.weights()}
    # Buffers that the model cannot do without.
    saved = learner.policy.model.state_dict().keys()
    weights |= {name: keep(buffer) for name, buffer in learner.policy.model.named_buffers() if name in saved}
    optimizer = learner.optimizer.state_dict()
    optimizer["state"] = {
        index: {name: keep(value) for name, value in moments.items()} for index, moments in optimizer["state"].items()
    }
    return _Content(weights, optimizer, learner.processes.gather([_random_states()]))


def _write(folder: Path, state: dict[str, Any], learner: Learner, content: _Content) -> None:
    policy = learner.policy
    policy.model.save_pretrained(folder, state_dict=content.weights)
    if policy.tokenizer is not None:
        policy.tokenizer.save_pretrained(folder)
    if learner.adapters is not None:
        learner.adapters.save_pretrained(folder / ADAPTER, save_embedding_layers=False)
    torch.save(content.optimizer, folder / OPTIMIZER)
    torch.save(content.random_states, folder / RANDOM_STATES)
    write_json(folder / STATE, state)


def drop_old(out: Path, keep: int | None) -> None:
    """Delete all checkpoints but the newest `keep`, and what a stopped run has left of one.

    Under its name, a checkpoint is whole or not there.
    """
    try:
        for old in list_checkpoints(out)[:-keep] if keep is not None else []:
            old.rename(old.with_name(f".{old.name}.partial"))
        drop_unfinished(out)
    except OSError as error:
        raise refusal(error, out / CHECKPOINTS, "go on with --resume") from error


def drop_unfinished(out: Path) -> None:
    for left in (out / CHECKPOINTS).glob(".step-*.partial"):
        shutil.rmtree(left)


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
