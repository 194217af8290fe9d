"""`gradscope demo`: samples and measures the embedded policy, or another one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gradscope.cli.measure import Measure
from gradscope.cli.sample import Sample
from gradscope.errors import InputError
from gradscope.gradients import MeasureSettings
from gradscope.policy import EMBEDDED
from gradscope.runs import RunFolder


@dataclass(frozen=True)
class Demo:
    """Run a small example: sample responses from a policy, measure them, draw figures, print a summary.

    The embedded policy answers Knights & Knaves puzzles; a policy given with --policy answers word problems.
    """

    out: Path = Path("demo-out")
    """Folder for rollouts_seed0.jsonl, tokens.parquet, manifest.json and figures/."""
    policy: str = "embedded"
    """The embedded policy, or the checkpoint folder of a pretrained language model; a few hundred million parameters
    take about five minutes on two cores."""
    seed: int = 0
    """Seed for the questions, the responses and the sample of tokens."""
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
        is_own = self.policy in EMBEDDED
        if self.overwrite or not rollouts.is_file():
            asked = _PUZZLES if is_own else _WORD_PROBLEMS
            Sample(model=self.policy, out=rollouts, questions=10, seed=self.seed, overwrite=True, **asked).sample()
        # A pretrained model is slow: of the five minutes, one is for sampling.
        settings = MeasureSettings(seed=self.seed, minutes=None if is_own else 4)
        known = {"settings": settings, "overwrite": self.overwrite}
        Measure(model=self.policy, rollouts=rollouts, out=self.out, **known).run()


_PUZZLES = {"task": "knights-knaves-compact", "temperature": 0.7}
_WORD_PROBLEMS = {"task": "word-problems-examples", "max_new_tokens": 48}
