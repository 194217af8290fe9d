"""Check whether `gradscope diagnose --minutes N` takes N minutes, and how much and how reliably it measures then.

    python -m analyses.benchmarks.minutes MODEL ROLLOUTS --minutes 10 --seeds 0 1 2 3 4 \
        --truth EXHAUSTIVE/data/statistics.csv --name "SmolLM2-135M-Instruct, 16 prompts"

A row per seed: minutes requested and taken by the wall clock (whole command, loading included), CPU minutes, machine
load, prompts used, tokens measured (`each`: in the interval with the fewest), peak memory, and each interval's share of
the gradient energy with its bounds. `held`: how many of these intervals contain the share measured on every token.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import tyro

from analyses.common.script import exit_with

TABLE = Path("figures/cost/data/minutes.csv")
SHARE = "squared_share"


@dataclass(frozen=True)
class Options:
    model: Annotated[str, tyro.conf.Positional]
    rollouts: Annotated[Path, tyro.conf.Positional]
    minutes: float = 10.0
    seeds: tuple[int, ...] = (0,)
    truth: Path | None = None
    """statistics.csv of a diagnosis with every token measured."""
    name: str | None = None
    """Name of policy and batch in the table; none: the model's."""
    threads: int = 2
    work: Path = Path("work/minutes")
    """Folder for the diagnoses."""
    out: Path = TABLE


def diagnose(options: Options, seed: int) -> dict[str, Any]:
    """Run the command once; return its cost and results."""
    folder = options.work / f"seed-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    own = {"OMP_NUM_THREADS": str(options.threads), "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, "-m", "gradscope", "diagnose", options.model, "--rollouts", str(options.rollouts)]
    command += ["--minutes", str(options.minutes), "--seed", str(seed), "--out", str(folder)]
    start, loads = time.monotonic(), [os.getloadavg()[0]]
    process = subprocess.Popen(command, env={**os.environ, **own})
    _, status, usage = os.wait4(process.pid, 0)
    taken = time.monotonic() - start
    loads.append(os.getloadavg()[0])
    if status:
        raise SystemExit(f"the diagnosis of seed {seed} ended with {os.waitstatus_to_exitcode(status)}")
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    found = pd.read_csv(folder / "data" / "statistics.csv")
    summed = found[(found["statistic"] == "gradient_share") & (found["metric"] == "raw")]
    shares = found[(found["statistic"] == SHARE) & (found["metric"] == "raw")].reset_index(drop=True)
    row = {"batch": options.name or options.model, "seed": seed, "asked": options.minutes, "taken": taken / 60}
    row |= {"cpu": (usage.ru_utime + usage.ru_stime) / 60, "load": max(loads)}
    row |= {"prompts": manifest["prompts"]["looked_at"], "of_prompts": manifest["prompts"]["of"]}
    tokens = pd.read_parquet(folder / "tokens.parquet", columns=["interval", "param_grad_norm"])
    each = tokens.dropna()["interval"].value_counts().min()
    row |= {"tokens": manifest["tokens"], "measured": manifest["tokens_measured"], "each": each}
    row |= {"summed_width": (summed["upper"] - summed["lower"]).max(), "gib": usage.ru_maxrss / 2**20}
    for place, share in shares.iterrows():
        row |= {f"share_{place}": share["value"], f"lower_{place}": share["lower"], f"upper_{place}": share["upper"]}
    if options.truth is not None:
        known = pd.read_csv(options.truth)
        true = known[(known["statistic"] == SHARE) & (known["metric"] == "raw")]["value"].to_numpy()
        row["held"] = int(((shares["lower"] <= true) & (true <= shares["upper"])).sum())
    return row


def main(options: Options) -> None:
    for seed in options.seeds:
        table = pd.DataFrame([diagnose(options, seed)])
        if options.out.is_file():
            table = pd.concat([pd.read_csv(options.out), table], ignore_index=True)
        table.round(4).to_csv(options.out, index=False)
        print(table.to_string(index=False), flush=True)


if __name__ == "__main__":
    exit_with(lambda: main(tyro.cli(Options, description=__doc__)))
