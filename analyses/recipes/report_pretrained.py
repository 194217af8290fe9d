"""Make a user's report of a pretrained policy: SmolLM2-135M-Instruct on word problems.

    python -m analyses.recipes.pretrained smollm2 --out work/smollm2
    python -m analyses.recipes.report_pretrained --policy work/smollm2 [--out figures/reports/report-smollm2]

Eight responses of at most 48 tokens to each of 16 problems, each after two worked ones, sampled at temperature 1, then
`gradscope diagnose` with 25 minutes. OUT gets the page and its tables, except the token table, which is large.

Differs from a training run: the policy has had no RL training, so it has no optimizer state; its weights are
de-quantised from four bits.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import tyro

from analyses.common.experiments import WORK
from analyses.common.script import exit_with
from analyses.recipes.report_example import KEPT
from gradscope.cli import main as gradscope

SAMPLE = ["--task", "word-problems-examples", "--questions", "16", "--n", "8", "--max-new-tokens", "48"]


@dataclass(frozen=True)
class Options:
    policy: Path = WORK / "smollm2"
    """Folder of the checkpoint."""
    work: Path = WORK / "report-smollm2"
    """Folder for the rollouts and the whole report."""
    out: Path = Path("figures/reports/report-smollm2")
    """Folder for the page and its tables."""
    minutes: float = 25
    """Time for the diagnosis, in minutes."""


def main(options: Options) -> None:
    rollouts, report = options.work / "rollouts.jsonl", options.work / "report"
    if not rollouts.is_file():
        gradscope(["sample", str(options.policy), *SAMPLE, "--out", str(rollouts)])
    flags = ["--minutes", str(options.minutes)]
    gradscope(["diagnose", str(options.policy), "--rollouts", str(rollouts), "--out", str(report), *flags])
    shutil.rmtree(options.out, ignore_errors=True)
    options.out.mkdir(parents=True)
    for name in KEPT:
        copy = shutil.copytree if (report / name).is_dir() else shutil.copy
        copy(report / name, options.out / name)


if __name__ == "__main__":
    exit_with(lambda: main(tyro.cli(Options, description=__doc__)))
