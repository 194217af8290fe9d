"""Measures the gradients of π's intervals along runs of the track puzzles: whose they are, and how much is signal.

    python -m analyses.common.measurements over_training [--scale cpu]

Before training, at step 100 and at the end a fresh batch of the run's own kind is sampled (32 × 8 responses, by
the run's seed and the step, so that variants meet the same puzzles), and the gradient of the run's own loss is summed
by interval, prompt by prompt; Lopti's is that of both its passes together. All is said of the raw gradients and in the
metric of AdamW's update, of which there is none before the first step. Leaves

    gradients.csv   by metric and interval: norm, share, signal and noise of the summed gradient, share of Σ‖w·g‖²
    cosines.csv     by metric and pair of intervals
    tokens.csv      by interval: counts, shares, entropy
    batches.csv     what was sampled

(`analyses/common/batch_gradients.py` has the columns) with variant, seed and step. The tables of each checkpoint are
kept below runs/ as they are made, and runs whose checkpoints are not there are left out: started again, only what is
new is measured. manifest.json is written when all runs are in.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import torch

import analyses.common.puzzles  # noqa: F401  (registers its tasks)
from analyses.common.batch_gradients import Tables, measure_batch
from analyses.common.experiments import WORK, Run, list_runs
from analyses.common.in_training import FRESH, Moment
from analyses.common.make_run import write
from analyses.common.measurements import list_measurements, write_manifest
from gradscope import load_policy
from gradscope.errors import InputError
from gradscope.policy import AdamWState
from gradscope.runs import MANIFEST, replacing
from gradscope.trainer import OPTIMIZER, list_checkpoints, step_of

NAME = "over_training"
STEP, QUESTIONS, RESPONSES = 100, 32, 8
TABLES = ("gradients", "cosines", "tokens", "batches")


def measure(out: Path, *, scale: str = "cpu") -> None:
    """Measure every checkpoint that is not measured yet, and write the tables into `out`.

    Raises InputError where no run is there at all.
    """
    runs, parts, missing = runs_to_measure(scale), [], []
    for run in runs:
        found = list(_measure_run(run, WORK / scale / "measured" / NAME))
        parts += found
        if not found or found[-1][1] < run.config.steps:
            missing.append(run.place.as_posix())
    if not parts:
        names = ", ".join(dict.fromkeys(f"{run.track}/{run.variant}" for run in runs))
        words = f"no checkpoint of {names}; make them: python -m analyses.reproduce --scale {scale}"
        raise InputError(f"{WORK / scale} has {words}")
    out.mkdir(parents=True, exist_ok=True)
    (out / MANIFEST).unlink(missing_ok=True)
    columns = {}
    for name in TABLES:
        table = pd.concat([_read(part / f"{name}.csv", run, step) for run, step, part in parts], ignore_index=True)
        write(table, out / f"{name}.csv")
        columns[f"{name}.csv"] = table.columns
    if missing:
        print(f"left out, not made to their end yet: {', '.join(missing)}")
        return
    write_manifest(out, columns, questions=QUESTIONS, responses=RESPONSES, batches=len(parts))


def runs_to_measure(scale: str) -> list[Run]:
    """Those that analyses/runs.toml names for this measurement, variant by variant."""
    [mine] = [measurement for measurement in list_measurements(scale) if measurement.name == NAME]
    runs = {(f"{run.track}/{run.variant}", run.seed): run for run in list_runs(scale)}
    return [runs[place, seed] for place in mine.after for seed in mine.seeds]


def measure_checkpoint(run: Run, step: int, checkpoint: Path | None) -> Tables:
    """The tables of one checkpoint; None: of the policy before training."""
    config, seed = run.config, FRESH + 1000 * run.seed + step
    policy, reference = load_policy(str(checkpoint or config.model)), load_policy(config.model)
    state = {} if checkpoint is None else torch.load(checkpoint / OPTIMIZER, weights_only=True)
    batch = Moment(step, policy, reference, state, config).sample(QUESTIONS, seed=seed, responses=RESPONSES)
    metric = AdamWState.from_state_dict(policy.model, state, max_grad_norm=config.max_grad_norm) if state else None
    settings = {"generator": torch.Generator().manual_seed(seed), "micro_batch_size": config.micro_batch_size}
    tables = measure_batch(policy, batch, config.loss, metric, **settings)
    return tables | {"batches": tables["batches"].assign(reward_mean=batch.rewards.mean().item())}


def _measure_run(run: Run, parts: Path) -> Iterator[tuple[Run, int, Path]]:
    """Each checkpoint of the run with the folder of its tables, which is there when it is whole."""
    found = {step_of(folder): folder for folder in list_checkpoints(WORK / run.place)}
    checkpoints = {step: folder for step, folder in found.items() if _is_wanted(run, step)}
    folder = parts / run.variant / f"seed{run.seed}"
    measured = {step_of(part): part for part in folder.glob("step-*")}
    steps = {0, *checkpoints, *measured} if checkpoints or measured else set()
    for step in sorted(steps):
        part = folder / f"step-{step:06d}"
        if step not in measured:
            start = time.process_time()
            _keep(measure_checkpoint(run, step, checkpoints.get(step)), part)
            print(f"{run.variant} seed {run.seed} step {step}: {time.process_time() - start:.0f} s", flush=True)
        yield run, step, part


def _is_wanted(run: Run, step: int) -> bool:
    return step in (STEP, run.config.steps)


def _keep(tables: Tables, part: Path) -> None:
    """A folder that is there is whole."""
    with replacing(part) as beside:
        beside.mkdir(parents=True)
        for name in TABLES:
            write(tables[name], beside / f"{name}.csv")


def _read(file: Path, run: Run, step: int) -> pd.DataFrame:
    """The table with the columns that tell it from those of other checkpoints, in front."""
    names = {"variant": run.variant, "seed": run.seed, "step": step}
    return pd.DataFrame(names, index=range(1)).merge(pd.read_csv(file, dtype={"interval": str}), how="cross")
