"""The command `gradscope demo`: the main job on the policy that comes along."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gradscope.cli.measure import Measure
from gradscope.cli.sample import Sample
from gradscope.errors import InputError
from gradscope.gradients import MeasureSettings
from gradscope.runs import RunFolder


@dataclass(frozen=True)
class Demo:
    """The main job on the embedded policy: sample Knights & Knaves responses, measure them, draw, print a summary."""

    out: Path = Path("demo-out")
    """Folder for rollouts_seed0.jsonl, tokens.parquet, manifest.json and figures/."""
    seed: int = 0
    """Draws the questions, the responses and the tokens that are measured."""
    overwrite: bool = False
    """Start anew if the folder holds something else."""

    def run(self) -> None:
        earlier = RunFolder(self.out, {}).manifest or {"seed": self.seed}
        if earlier.get("seed") != self.seed and not self.overwrite:
            raise InputError(
                f"{self.out} holds a run with seed {earlier.get('seed')}, not {self.seed}; give another --out, or "
                "--overwrite"
            )
        rollouts = self.out / f"rollouts_seed{self.seed}.jsonl"
        if self.overwrite or not rollouts.is_file():
            Sample(
                model="embedded",
                out=rollouts,
                task="knights-knaves-compact",
                questions=10,
                temperature=0.7,
                seed=self.seed,
                overwrite=True,
            ).sample()
        settings = MeasureSettings(seed=self.seed)
        Measure("embedded", rollouts, self.out, settings, constants=3, overwrite=self.overwrite).run()
