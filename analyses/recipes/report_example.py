"""The report of a run, as a user would have it: the embedded policy at five checkpoints of 40 GRPO steps.

    python -m analyses.recipes.report_example [--out figures/report-example] [--run runs/cpu/in-training/grpo/seed0]

At each checkpoint 8 responses to the same 16 puzzles of 2 to 4 people, at the run's temperature of 0.7; the puzzles are
drawn by a seed that the run does not use. Then `gradscope diagnose` with the optimizer's saved state, by 500 tokens of
each interval; at the earlier ones a step is split by source on 5,000 tokens. OUT gets the page of the trend, and the
last checkpoint's own page with its tables; what else was made stays in RUN/report.

Differs from what the run trained on: the batch is 16 × 8 responses in one optimizer step, the run's are 16 × 8 in two;
log π of the reference is not in the rollouts, so that the KL term's part of the weights is 0. The untrained policy is
left out, for it has no optimizer state, and its steps would be another optimizer's.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch
import tyro

from analyses.common.in_training import FRESH, RUN, moments
from analyses.common.script import exit_with
from gradscope import __version__
from gradscope.cli import main as gradscope
from gradscope.cli.pages import STATISTICS, describe_rollouts
from gradscope.diagnosis import make_trend_report, write_report
from gradscope.runs import MANIFEST, read_json
from gradscope.trainer import list_checkpoints, step_of

STEPS = (4, 12, 20, 28, 40)
SAMPLE = ["--questions", "16", "--n", "8", "--people", "2", "3", "4", "--temperature", "0.7"]
SAMPLE += ["--task", "knights-knaves-compact", "--max-new-tokens", "400", "--seed", str(FRESH)]
EARLIER = ["--tokens-per-interval", "500", "--influence-tokens", "5000"]
KEPT = ("report.html", "manifest.json", "data")
"""Of a checkpoint's folder, what goes with the trend; tokens.parquet is large."""


@dataclass(frozen=True)
class Options:
    """The report of a run."""

    out: Path = Path("figures/report-example")
    """Folder for the pages and their tables."""
    run: Path = RUN
    """Folder of the run, trained first where it is not there yet."""


def diagnose(checkpoint: Path, work: Path, flags: list[str]) -> Path:
    """Sample and diagnose, unless that was done before; the folder of the page."""
    folder, rollouts = work / checkpoint.name, work / f"{checkpoint.name}.jsonl"
    if not rollouts.is_file():
        gradscope(["sample", str(checkpoint), *SAMPLE, "--out", str(rollouts)])
    gradscope(["diagnose", str(checkpoint), "--rollouts", str(rollouts), "--out", str(folder), *flags])
    return folder


def write_pages(folders: dict[int, Path], out: Path) -> None:
    """The trend, and beside it the last checkpoint's page."""
    frames = [pd.read_csv(folder / STATISTICS).assign(step=step) for step, folder in folders.items()]
    last = folders[max(folders)]
    notes = ["The pages of the earlier checkpoints are not beside this one, for their size."]
    links = [(f"step {max(folders)}", f"{last.name}/{KEPT[0]}")]
    facts = {f"step {step}": describe_rollouts(read_json(folder / MANIFEST)) for step, folder in folders.items()}
    facts |= {"gradscope": __version__, "made by": "python -m analyses.recipes.report_example"}
    trend = pd.concat(frames, ignore_index=True)
    write_report(out, make_trend_report(trend, links=links, notes=notes, facts=facts))
    shutil.rmtree(out / last.name, ignore_errors=True)
    (out / last.name).mkdir()
    for name in KEPT:
        copy = shutil.copytree if (last / name).is_dir() else shutil.copy
        copy(last / name, out / last.name / name)


def main(options: Options) -> None:
    torch.set_num_threads(1)
    moments(run=options.run, last=1)
    checkpoints = {step: path for path in list_checkpoints(options.run) if (step := step_of(path)) in STEPS}
    work = options.run / "report"
    folders = {step: diagnose(path, work, EARLIER if step < max(STEPS) else []) for step, path in checkpoints.items()}
    write_pages(folders, options.out)


if __name__ == "__main__":
    exit_with(lambda: main(tyro.cli(Options, description=__doc__)))
