"""Measure the gradients of π's intervals along runs of the track puzzles: their shares and their signal.

    python -m analyses.common.measurements over_training [--scale cpu]

Before training, at step 100 and at the end, a fresh batch like the run's is sampled (32 × 8 responses, seeded by the
run's seed and the step, so that variants meet the same puzzles), and the gradient of the run's own loss is summed by
interval and prompt; Lopti's is that of both passes together. All numbers exist for the raw gradients and, after the
first step, in the metric of AdamW's update. Writes

    gradients.csv   by metric and interval: norm, share, signal and noise of the summed gradient, share of Σ‖w·g‖²
    cosines.csv     by metric and pair of intervals
    tokens.csv      by interval: counts, shares, entropy
    batches.csv     what was sampled

(columns: `analyses/common/batch_gradients.py`) with variant, seed and step. Each checkpoint's tables are kept below
runs/, and runs without checkpoints are skipped, so that a restart measures only what is new. manifest.json is written
when all runs are included.
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
from analyses.common.measurements import list_measurements, write_manifest
from analyses.common.tables import write_csv
from gradscope import load_policy
from gradscope.errors import InputError
from gradscope.policy import AdamWState
from gradscope.runs import MANIFEST, replacing
from gradscope.trainer import OPTIMIZER, list_checkpoints, step_of

NAME = "over_training"
STEP, QUESTIONS, RESPONSES = 100, 32, 8
TABLES = ("gradients", "cosines", "tokens", "batches")


def measure(out: Path, *, scale: str = "cpu") -> None:
    """Measure every new checkpoint, and write the tables into `out`.

    Raises InputError if no run exists.
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
        write_csv(table, out / f"{name}.csv", float_format="%.6g")
        columns[f"{name}.csv"] = table.columns
    if missing:
        print(f"left out, not made to their end yet: {', '.join(missing)}")
        return
    write_manifest(out, columns, questions=QUESTIONS, responses=RESPONSES, batches=len(parts))


def runs_to_measure(scale: str) -> list[Run]:
    """Return the runs that analyses/runs.toml names for this measurement, by variant."""
    [mine] = [measurement for measurement in list_measurements(scale) if measurement.name == NAME]
    runs = {(f"{run.track}/{run.variant}", run.seed): run for run in list_runs(scale)}
    return [runs[place, seed] for place in mine.after for seed in mine.seeds]


def measure_checkpoint(run: Run, step: int, checkpoint: Path | None) -> Tables:
    """Return the tables of one checkpoint; None: of the untrained policy."""
    config, seed = run.config, FRESH + 1000 * run.seed + step
    policy, reference = load_policy(str(checkpoint or config.model)), load_policy(config.model)
    state = {} if checkpoint is None else torch.load(checkpoint / OPTIMIZER, weights_only=True)
    batch = Moment(step, policy, reference, state, config).sample(QUESTIONS, seed=seed, responses=RESPONSES)
    metric = AdamWState.from_state_dict(policy.model, state, max_grad_norm=config.max_grad_norm) if state else None
    settings = {"generator": torch.Generator().manual_seed(seed), "micro_batch_size": config.micro_batch_size}
    tables = measure_batch(policy, batch, config.loss, metric, **settings)
    return tables | {"batches": tables["batches"].assign(reward_mean=batch.rewards.mean().item())}


def _measure_run(run: Run, parts: Path) -> Iterator[tuple[Run, int, Path]]:
    """Measure each checkpoint of the run and return it with its folder of tables, written atomically."""
    found = {step_of(folder): folder for folder in list_checkpoints(WORK / run.place)}
    checkpoints = {step: folder for step, folder in found.items() if step in (STEP, run.config.steps)}
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


def _keep(tables: Tables, part: Path) -> None:
    """Write the folder atomically."""
    with replacing(part) as beside:
        beside.mkdir(parents=True)
        for name in TABLES:
            write_csv(tables[name], beside / f"{name}.csv", float_format="%.6g")


def _read(file: Path, run: Run, step: int) -> pd.DataFrame:
    """Read the table, with columns that identify its checkpoint in front."""
    names = {"variant": run.variant, "seed": run.seed, "step": step}
    return pd.DataFrame(names, index=range(1)).merge(pd.read_csv(file, dtype={"interval": str}), how="cross")
