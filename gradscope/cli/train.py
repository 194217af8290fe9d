"""`gradscope train`: runs GRPO or REINFORCE++ in a folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from gradscope.cli.flags import quiet_transformers
from gradscope.errors import InputError, first_line
from gradscope.runs import is_first
from gradscope.trainer import TrainConfig

TOLD = {"reward_mean": "reward", "accuracy": "accuracy"}
"""Columns summarized at the end of a run → their printed names."""
FEW = 5
"""Steps over which the first and last rewards are averaged."""


@dataclass(frozen=True)
class Train:
    """Train a policy with GRPO or REINFORCE++, Advantage Reweighting and Lopti; every setting is a flag.

    Under `accelerate launch`, several processes share the work. Writes config.json, metrics.jsonl, checkpoints/ and
    TensorBoard logs to OUT.
    """

    out: Path
    """Folder of the run."""
    preset: str | None = None
    """Settings to start from, overridden by the flags below: kk-embedded, kk-qwen2.5-3b, …."""
    config: Annotated[TrainConfig, tyro.conf.arg(name="")] = field(default_factory=TrainConfig)
    resume: bool = False
    """Resume from the newest checkpoint in OUT, or start from scratch if there is none."""
    overwrite: bool = False
    """Replace a run in OUT."""

    @staticmethod
    def defaults(args: Sequence[str]) -> dict[str, Any]:
        """Return the flags' defaults, from the preset named in `args`."""
        given = None
        for arg, following in zip(args, [*args[1:], ""], strict=False):
            name, equals, value = arg.partition("=")
            if name == "--preset":
                given = value if equals else following
        if given is None:
            return {}
        from gradscope.trainer import get_preset

        return {"default": Train(tyro.MISSING, given, get_preset(given))}

    def run(self) -> None:
        from gradscope.trainer import train

        quiet_transformers()
        last = train(self.config, self.out, resume=self.resume, overwrite=self.overwrite)
        if is_first():
            self._tell(last)

    def _tell(self, last: Path) -> None:
        """Print the results, and the next command."""
        for line in _sum_up(self.out / "metrics.jsonl"):
            print(line)
        print(f"last checkpoint: {last}")
        task = f"--task {self.config.task} --temperature {self.config.temperature:g}"
        for name in ("data", "people"):
            if values := getattr(self.config, name):
                task += f" --{name} {' '.join(map(str, values))}"
        print(f"next: gradscope evaluate {last} {task} --out DIR")


def _sum_up(metrics: Path) -> list[str]:
    """Summarize the first and last rewards and accuracies. Raises InputError if the file is gone or damaged."""
    import pandas as pd

    try:
        steps = pd.read_json(metrics, lines=True)
        ends = {name: (steps[name].head(FEW).mean(), steps[name].tail(FEW).mean()) for name in TOLD}
        form = "{}: {:.2f} at first, {:.2f} at the end of {} steps".format
        return [form(TOLD[name], *two, len(steps)) for name, two in ends.items()]
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise InputError(
            f"all steps are done, but {metrics} cannot be read ({first_line(error)}); delete the damaged lines"
        ) from error
