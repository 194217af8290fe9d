"""Resident memory over time: 1,000 steps of the trainer, and a million response tokens sampled and put into a table.

    python -m analyses.benchmarks.flat_memory [--out figures] [--only train sample measure] [--steps 1000]

Each is a command in a process of its own with one thread, whose resident memory is read twice a second.
Gradients are measured of 500 tokens of each interval; all tokens have their other columns. Leaves
flat_memory.png, and flat_memory.csv with a row per reading; prints, for each, the memory after a tenth of the time, at
the end and at most, in MB.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import matplotlib.pyplot as plt
import pandas as pd
import psutil
import tyro
from matplotlib.figure import Figure

from analyses.common.script import exit_with
from gradscope.plots import paper_style, save_figure

EVERY = 0.5
"""Seconds between readings."""
WORDS = {
    "train": "train --preset kk-embedded --steps STEPS --questions-per-step 2 --group-size 4 --mini-batch-size 8"
    " --max-new-tokens 64 --save-every 100 --keep-checkpoints 2 --trackers --device cpu --out FOLDER/train",
    "sample": "sample embedded --task knights-knaves-compact --questions QUESTIONS --n 8 --temperature 0.7"
    " --max-new-tokens 400 --device cpu --out FOLDER/rollouts.parquet",
    "measure": "measure embedded FOLDER/rollouts.parquet --tokens-per-interval 500 --device cpu --no-figures"
    " --out FOLDER/measured",
}
TITLES = {"train": "{count:,} steps", "sample": "{count:,} tokens sampled", "measure": "table of {count:,} tokens"}


@dataclass(frozen=True)
class Options:
    """Settings of the script."""

    out: Path = Path("figures")
    """Folder of the picture and the table."""
    only: tuple[Literal["train", "sample", "measure"], ...] = ("train", "sample", "measure")
    """Which of the three; a measurement needs its sample."""
    steps: int = 1000
    """Optimizer steps of the training run."""
    questions: int = 2_250
    """Puzzles with 8 responses of some 57 tokens each."""


def watch(words: list[str]) -> pd.DataFrame:
    """Run `python -m gradscope WORDS`: seconds since its start, and its resident memory in MB."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "gradscope", *words]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    begun, rows = time.monotonic(), []
    while process.poll() is None:
        with suppress(psutil.NoSuchProcess):
            if held := psutil.Process(process.pid).memory_info().rss:  # 0 once it has ended
                rows.append((time.monotonic() - begun, held / 1e6))
        time.sleep(EVERY)
    if process.returncode:
        raise RuntimeError(f"gradscope {words[0]} ended with status {process.returncode}")
    return pd.DataFrame(rows, columns=["seconds", "megabytes"])


def count_done(work: str, folder: Path) -> int:
    """Steps of a run, response tokens of a file or a table."""
    if work == "train":
        return len((folder / "train" / "metrics.jsonl").read_text().splitlines())
    if work == "sample":
        return int(pd.read_parquet(folder / "rollouts.parquet")["response_ids"].map(len).sum())
    return len(pd.read_parquet(folder / "measured" / "tokens.parquet", columns=["response"]))


@paper_style()
def draw(found: pd.DataFrame) -> Figure:
    """Memory over the time of each."""
    works = found["work"].unique()
    figure, axes = plt.subplots(1, len(works), figsize=(2.4 * len(works), 2.2), sharey=True, squeeze=False)
    for ax, work in zip(axes[0], works, strict=True):
        own = found[found["work"] == work]
        ax.plot(own["seconds"] / own["seconds"].max(), own["megabytes"], lw=1)
        ax.set(title=TITLES[work].format(count=own["count"].iloc[0]), xlabel="part of the time")
    axes[0, 0].set(ylabel="resident memory (MB)", ylim=(0, 1.05 * found["megabytes"].max()))
    figure.tight_layout()
    return figure


def main(options: Options) -> None:
    frames = []
    with tempfile.TemporaryDirectory() as folder:
        values = {"FOLDER": folder, "STEPS": str(options.steps), "QUESTIONS": str(options.questions)}
        for work in options.only:
            words = WORDS[work]
            for name, value in values.items():
                words = words.replace(name, value)
            found = watch(words.split())
            found = found.assign(work=work, count=count_done(work, Path(folder)))
            frames.append(found)
            early = found.loc[found["seconds"] > 0.1 * found["seconds"].max(), "megabytes"]
            count = found["count"].iloc[0]
            print(f"{work}, {count:,}: {early.iloc[0]:.0f}, {early.iloc[-1]:.0f}, {early.max():.0f} MB", flush=True)
    table = pd.concat(frames, ignore_index=True)[["work", "count", "seconds", "megabytes"]].round(2)
    save_figure(draw(table), options.out / "flat_memory.png", table)


if __name__ == "__main__":
    exit_with(lambda: main(tyro.cli(Options, description=__doc__)))
