"""The folder of a run: what it says of itself, and where in it a run goes on."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch

from gradscope import __version__
from gradscope.errors import InputError
from gradscope.models import EMBEDDED, fetch_policy, weights_hash
from gradscope.run_folder import check_is_folder, library_versions, read_json, write_json
from gradscope.trainer.checkpoints import CHECKPOINTS, checkpoint_step, list_checkpoints
from gradscope.trainer.config import TrainConfig
from gradscope.trainer.learner import Learner

CONFIG, METRICS, MANIFEST = "config.json", "metrics.jsonl", "manifest.json"
ROLLOUTS, TRACKERS = "rollouts", "trackers"
WRITTEN = (METRICS, MANIFEST, CHECKPOINTS, ROLLOUTS, TRACKERS, CONFIG)
REPLACED, DROPPED = ".replaced", ".dropped"
"""Where a run that is overwritten waits until the new one has made a step, and where it is deleted from then."""
CHANGEABLE = ("steps", "epochs", "save_every", "keep_checkpoints", "save_rollouts", "trackers")
"""Fields that a resumed run may have otherwise: they do not change the numbers of a step."""


def find_start(config: TrainConfig, out: Path, total: int, *, resume: bool, overwrite: bool) -> Path | None:
    """The checkpoint to go on from; None: the beginning. Nothing is written.

    Raises InputError for a folder that holds a run, unless it is finished, resumed, or to be overwritten; for one that
    was made with other settings, or has more steps; and, always, for one that holds what no run of training wrote.
    """
    check_is_folder(out)
    if resume and overwrite:
        raise InputError("--resume goes on and --overwrite starts anew; give one of them")
    earlier, wanted = read_json(out / CONFIG), json.loads(json.dumps(asdict(config)))
    if earlier is None:
        if found := next((name for name in WRITTEN if _is_something(out / name)), None):
            raise InputError(f"{out} holds {found}, and no {CONFIG} of a run beside it; give another --out")
        return None
    if earlier.keys() != wanted.keys():
        raise InputError(f"{out / CONFIG} is not of a run of this gradscope; give another --out")
    if overwrite:
        return None
    changed = [name for name in wanted if wanted[name] != earlier[name] and name not in CHANGEABLE]
    if changed:
        values = ", ".join(f"{name} {earlier[name]}, not {wanted[name]}" for name in changed[:3])
        raise InputError(f"{out} holds a run with other settings ({values}); give another --out, or --overwrite")
    newest = next(iter(list_checkpoints(out)[::-1]), None)
    done = 0 if newest is None else checkpoint_step(newest)
    if done > total:
        raise InputError(
            f"{out} holds a run of {done} steps already, more than the {total} asked for; its last checkpoint is "
            f"{newest}; give {done} steps or more, another --out, or --overwrite"
        )
    finished = done == total
    if not (resume or finished):
        raise InputError(f"{out} holds an unfinished run; give --resume to go on, another --out, or --overwrite")
    return newest


def remove_run(out: Path) -> None:
    """Drop what a run wrote, and nothing else."""
    for name in WRITTEN:
        if (out / name).is_dir():
            shutil.rmtree(out / name)
        else:
            (out / name).unlink(missing_ok=True)


def set_aside(out: Path) -> int:
    """Move a run that is to be replaced to where `bring_back` finds it; its size in bytes."""
    if not (out / CONFIG).is_file():
        return 0
    aside = out / REPLACED
    aside.mkdir()
    for name in WRITTEN:  # config.json last: once it is there, all of the run is
        if (out / name).exists():
            os.replace(out / name, aside / name)
    return sum(file.stat().st_size for file in aside.rglob("*") if file.is_file())


def bring_back(out: Path) -> bool:
    """Put a run that was set aside in the place of the one that was to replace it; False if there is none.

    What is left of one that was dropped goes. Killed at any point, it can be called again.
    """
    shutil.rmtree(out / DROPPED, ignore_errors=True)
    aside = out / REPLACED
    if not aside.is_dir():
        return False
    if (aside / CONFIG).is_file():
        remove_run(out)
    for name in reversed(WRITTEN):  # config.json first: from then on, what lies in the folder is the old run's
        if (aside / name).exists():
            os.replace(aside / name, out / name)
    aside.rmdir()
    return True


def drop_replaced(out: Path) -> None:
    """Delete the run that was set aside, if there is one."""
    if (out / REPLACED).is_dir():
        os.replace(out / REPLACED, out / DROPPED)  # at once: it is no more to be brought back
        shutil.rmtree(out / DROPPED)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Name what is written in an OSError: the system's own words may be no more than "No space left on device"."""
    try:
        yield
    except OSError as error:
        raise OSError(
            f"{path} could not be written ({error.strerror or error}); make room there and go on with --resume"
        ) from error


def write_description(
    out: Path, config: TrainConfig, learner: Learner, questions: str | None, *, resumed: bool
) -> None:
    """config.json, what was asked for; manifest.json, with what and where it runs.

    questions: a hash of those that are stored. Raises InputError where a resumed run began with another policy or
    other questions; warns where it had another number of processes, which share out the random numbers.
    """
    begun_with = EMBEDDED if config.model == "embedded" else fetch_policy(config.model)
    manifest = {
        "gradscope": __version__,
        "versions": library_versions(),
        "model": {
            "path": config.model,
            "class": type(learner.policy.model).__name__,
            "sha256": weights_hash(begun_with),
        },
        "questions": questions,
        "parameters": sum(p.numel() for p in learner.policy.model.parameters()),
        "trained_parameters": sum(p.numel() for p in learner.policy.model.parameters() if p.requires_grad),
        "device": str(learner.updater.device),
        "processes": learner.processes.count,
        "threads": torch.get_num_threads(),
    }
    earlier = read_json(out / MANIFEST) if resumed else None
    if earlier is not None:
        for name in ("model", "questions"):
            if earlier.get(name) != manifest[name]:
                raise InputError(f"the {name} of the run in {out} changed since it began; give another --out")
        if (before := earlier.get("processes")) != learner.processes.count:
            warnings.warn(
                f"begun with {before} processes and resumed with {learner.processes.count}: from here on, other "
                "responses are sampled than in an undisturbed run",
                stacklevel=2,
            )
    write_json(out / CONFIG, asdict(config))
    write_json(out / MANIFEST, manifest)


def _is_something(path: Path) -> bool:
    return path.is_file() or (path.is_dir() and any(path.iterdir()))
