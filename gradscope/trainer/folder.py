"""The folder of a run: what it says of itself, and where in it a run goes on."""

from __future__ import annotations

import json
import platform
import shutil
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from gradscope import __version__
from gradscope.errors import InputError
from gradscope.run_folder import check_is_folder, write_json
from gradscope.trainer.checkpoints import CHECKPOINTS, checkpoint_step, list_checkpoints
from gradscope.trainer.config import TrainConfig
from gradscope.trainer.learner import Learner

CONFIG, METRICS, MANIFEST = "config.json", "metrics.jsonl", "manifest.json"
CHANGEABLE = ("steps", "epochs", "save_every", "keep_checkpoints", "save_rollouts", "trackers")
"""Fields that a resumed run may have otherwise: they do not change the numbers of a step."""


def find_start(config: TrainConfig, out: Path, total: int, *, resume: bool, overwrite: bool) -> Path | None:
    """The checkpoint to go on from; None: the beginning. Nothing is written.

    Raises InputError for a folder that holds a run, unless it is finished, resumed, or to be overwritten; and for one
    that was made with other settings.
    """
    check_is_folder(out)
    if overwrite or not (out / CONFIG).is_file():
        return None
    earlier, wanted = _read(out / CONFIG), json.loads(json.dumps(asdict(config)))
    if earlier.keys() != wanted.keys():
        raise InputError(f"{out / CONFIG} is not of a run of this gradscope; give another --out")
    changed = [name for name in wanted if wanted[name] != earlier[name] and name not in CHANGEABLE]
    if changed:
        values = ", ".join(f"{name} {earlier[name]}, not {wanted[name]}" for name in changed[:3])
        raise InputError(f"{out} holds a run with other settings ({values}); give another --out, or --overwrite")
    newest = next(iter(list_checkpoints(out)[::-1]), None)
    finished = newest is not None and checkpoint_step(newest) >= total
    if not (resume or finished):
        raise InputError(f"{out} holds an unfinished run; give --resume to go on, another --out, or --overwrite")
    return newest


def remove_run(out: Path) -> None:
    """Drop what a run wrote, and nothing else; the folder too if it is empty then."""
    for name in (CONFIG, METRICS, MANIFEST):
        (out / name).unlink(missing_ok=True)
    for name in (CHECKPOINTS, "rollouts", "trackers"):
        shutil.rmtree(out / name, ignore_errors=True)
    if out.is_dir() and not any(out.iterdir()):
        out.rmdir()


def write_description(out: Path, config: TrainConfig, learner: Learner) -> None:
    """config.json, what was asked for; manifest.json, with what and where it runs."""
    libraries = ("torch", "transformers", "accelerate", "numpy")
    write_json(out / CONFIG, asdict(config))
    write_json(
        out / MANIFEST,
        {
            "gradscope": __version__,
            "versions": {name: version(name) for name in libraries} | {"python": platform.python_version()},
            "model": {"path": learner.policy.path, "class": type(learner.policy.model).__name__},
            "parameters": sum(p.numel() for p in learner.policy.model.parameters()),
            "trained_parameters": sum(p.numel() for p in learner.policy.model.parameters() if p.requires_grad),
            "device": str(learner.updater.device),
            "processes": learner.processes.count,
        },
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
