"""Make a user's report of a run: the embedded policy at five checkpoints of 40 GRPO steps.

    python -m analyses.recipes.report_example [--out FOLDER] [--run runs/cpu/in-training/grpo/seed0]

At each checkpoint the policy gives 8 responses to each of the same 64 puzzles of 2 to 4 people, at the run's
temperature of 0.7; the puzzles are drawn by a seed that the run does not use. Then `gradscope diagnose` runs with the
optimizer's saved state and 500 tokens per interval; at the earlier checkpoints a step is split by source on 5,000
tokens and token weightings are not compared. OUT gets the trend's page, and the last checkpoint's page with its tables;
everything else stays in RUN/report.

Differs from the run's training: a batch of 64 × 8 responses makes one optimizer step; the run makes two from each batch
of 16 × 8. The rollouts lack the reference's log π, so the KL term's part of the weights is 0. The untrained policy is
left out because it has no optimizer state.
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
SAMPLE = ["--questions", "64", "--n", "8", "--people", "2", "3", "4", "--temperature", "0.7"]
SAMPLE += ["--task", "knights-knaves-compact", "--max-new-tokens", "400", "--seed", str(FRESH)]
EARLIER = ["--tokens-per-interval", "500", "--influence-tokens", "5000", "--no-compare"]
KEPT = ("report.html", "manifest.json", "data")
"""Files of a checkpoint's folder that go with the trend; tokens.parquet is large."""


@dataclass(frozen=True)
class Options:
    out: Path = Path("figures/reports/report-example")
    """Folder for the pages and their tables."""
    run: Path = RUN
    """Folder of the run; trained first if missing."""


def diagnose(checkpoint: Path, work: Path, flags: list[str]) -> Path:
    """Sample and diagnose, unless done before; returns the page's folder."""
    folder, rollouts = work / checkpoint.name, work / f"{checkpoint.name}.jsonl"
    if not rollouts.is_file():
        gradscope(["sample", str(checkpoint), *SAMPLE, "--out", str(rollouts)])
    gradscope(["diagnose", str(checkpoint), "--rollouts", str(rollouts), "--out", str(folder), *flags])
    return folder


def write_pages(folders: dict[int, Path], out: Path) -> None:
    """Write the trend's page, and the last checkpoint's beside it."""
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
