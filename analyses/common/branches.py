"""Short branches from GRPO checkpoints: a few steps of each method from the same weights and optimizer state.

The runs are the track `origins` of analyses/runs.toml for a scale's policy; branches start at the checkpoints STEPS.
All methods of a replicate share its puzzles. Branches are kept below runs/ and are resumed if interrupted.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from analyses.common.experiments import WORK, configure, list_runs
from gradscope.policy import find_checkpoint, weights_hash
from gradscope.trainer import list_checkpoints, train

TRACK, STEPS = "origins", (0, 40, 80)
VARIANTS = ("grpo", "reweight", "lopti", "random-split", "high-entropy")
REPLICATES, LENGTH = 4, 10


@dataclass(frozen=True)
class Origin:
    """A checkpoint from which branches start."""

    scale: str
    seed: int
    step: int

    @property
    def run(self) -> Path:
        """Folder of its run."""
        return WORK / self.scale / TRACK / "grpo" / f"seed{self.seed}"

    @property
    def folder(self) -> Path:
        """Folder of the checkpoint, or of the untrained policy."""
        if self.step == 0:
            return Path(find_checkpoint(configure(self.scale, TRACK, "grpo").model))
        return self.run / "checkpoints" / f"step-{self.step:06d}"

    @property
    def weights(self) -> str:
        """First digits of the weights' hash, which tell it from another run's checkpoint."""
        return weights_hash(self.folder)[:12]


def list_origins(scale: str) -> Iterator[Origin]:
    """Return all origins of a scale, the untrained policy once; trains missing runs first."""
    untrained = True
    for run in list_runs(scale):
        if run.track == TRACK:
            there = list_checkpoints(WORK / run.place)
            if not there or there[-1].name != f"step-{max(STEPS):06d}":
                train(run.config, WORK / run.place, resume=True, progress=False)
            yield from (Origin(scale, run.seed, step) for step in STEPS if step or untrained)
            untrained = False


def take_branch(origin: Origin, variant: str, replicate: int, steps: int) -> Path:
    """Return the checkpoint after this many steps of a method."""
    place = f"{origin.step}-{variant}-{replicate}-{steps}"
    out = origin.run.parent.parent / "branches" / f"seed{origin.seed}" / place
    config = replace(
        configure(origin.scale, TRACK, variant),
        seed=1000 * (origin.seed + 1) + 10 * origin.step + replicate,
        steps=origin.step + steps,
        save_every=origin.step + steps,
    )
    if origin.step and not out.exists():
        beside = out.with_name(place + ".partial")
        shutil.rmtree(beside, ignore_errors=True)
        shutil.copytree(origin.folder, beside / "checkpoints" / origin.folder.name)
        shutil.copy(origin.run / "metrics.jsonl", beside)  # the trainer keeps its lines up to the checkpoint
        (beside / "config.json").write_text(json.dumps(asdict(config)), encoding="utf-8")
        beside.rename(out)
    return train(config, out, resume=True, progress=False)
