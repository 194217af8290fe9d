"""Counts false verdicts on real checkpoints, whose truth is that of 2,000 prompts.

    python -m analyses.verdicts.checkpoints [--runs runs/verdicts] [--out FILE.csv]

Five checkpoints of each of two GRPO runs of `embedded-certain` (trained here first, where they are not there yet).
At each, 4 responses to each of 2,000 puzzles; 3,000 tokens of each probability interval are measured, with known
chances. All prompts together define the truth; their 31 disjoint batches of 64 prompts are each given a verdict by
the code of `diagnose`, on the same sample of tokens, which is about 100 of each interval: `--each 50_000` gives a batch
what `diagnose` itself measures, and `--informative` 64 prompts that have an advantage, as on planted tables. So this
tests the sentences about tokens, on a table that is itself a sample: dominance, the ranking, what (1−π)² predicts,
where the energy is, what norms follow. Sentences on summed gradients and steps are tested on planted tables only.
Prints and writes the table of `planted.tabulate`, and every verdict by checkpoint. Each checkpoint's table is kept in
RUNS; an interrupted run resumes.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import tyro
from tqdm import tqdm

import gradscope
from analyses.common.script import exit_with
from analyses.verdicts.planted import Judged, diagnose_tokens, judge_tokens, tabulate
from gradscope.trainer import get_preset, train

SEEDS, STEPS = (11, 12), (4, 12, 20, 28, 40)
PROMPTS, BATCH = 2_000, 64
PARTS = 10
"""In which prompts are measured."""
COLUMNS = ["group", "response", "position", "token", "prob", "log_one_minus_prob", "entropy", "advantage", "weight"]
COLUMNS += ["interval", "sampling_probability", "logit_grad_norm", "act_grad_norm.0", "param_grad_norm"]


def measure_checkpoint(checkpoint: Path, kept: Path, each: int) -> pd.DataFrame:
    """Return the sampled table of all prompts, `each` tokens per interval; measure it in parts unless it is there."""
    if not kept.is_file():
        policy, parts, size = gradscope.load_policy(checkpoint), [], PROMPTS // PARTS
        for part in tqdm(range(PARTS), str(checkpoint)):
            asked = {"task": "knights-knaves-compact", "questions": size, "n": 4, "temperature": 0.7}
            batch = gradscope.sample(policy, **asked, max_new_tokens=400, seed=20_000 + part)
            table = gradscope.measure(policy, batch, tokens_per_interval=each // PARTS, seed=part)
            parts.append(table[COLUMNS].assign(group=table["group"] + part * size))
        pd.concat(parts, ignore_index=True).to_parquet(kept)
    return pd.read_parquet(kept)


def judge_checkpoint(table: pd.DataFrame, seed: int, *, informative: bool) -> list[Judged]:
    """Every disjoint batch of 64 prompts against all prompts; informative: of so many as have 64 with an advantage."""
    truth = diagnose_tokens(table, None)
    order = np.random.default_rng(seed).permutation(table["group"].unique())
    served = table.loc[table["advantage"] != 0, "group"].nunique() / len(order)
    size, judged = round(BATCH / served) if informative else BATCH, []
    for number in range(len(order) // size):
        rng = np.random.default_rng([seed, number])
        own = table[table["group"].isin(order[number * size : (number + 1) * size])]
        judged += judge_tokens(diagnose_tokens(own.reset_index(drop=True), rng), truth)
    return judged


def main(
    runs: Path = Path("runs/verdicts"),
    out: Path = Path("figures/verdicts/data/verdicts_checkpoints.csv"),
    seeds: tuple[int, ...] = SEEDS,
    steps: tuple[int, ...] = STEPS,
    each: int = 3_000,
    informative: bool = False,
) -> None:
    """runs: where checkpoints and tables are kept; out: the CSV; seeds, steps: of the runs and their checkpoints; each:
    measured tokens of each interval in all; informative: batches have 64 prompts with an advantage."""
    parts, everything = [], []
    for seed in seeds:
        run = runs / f"seed{seed}"
        preset = replace(get_preset("kk-embedded"), model="embedded-certain", steps=max(STEPS), save_every=4)
        train(replace(preset, seed=seed, trackers=()), run, resume=True)
        for step in steps:
            kept = runs / f"seed{seed}-{step}-{each}.parquet"
            table = measure_checkpoint(run / "checkpoints" / f"step-{step:06d}", kept, each)
            judged = judge_checkpoint(table, seed, informative=informative)
            everything += judged
            parts.append(tabulate(judged).assign(seed=seed, step=step))
            print(f"seed {seed}, step {step}\n{parts[-1].to_string(index=False)}", flush=True)
    whole = tabulate(everything)
    print(whole.to_string(index=False))
    pd.concat([whole.assign(seed="all", step="all"), *parts], ignore_index=True).to_csv(out, index=False)


if __name__ == "__main__":
    exit_with(lambda: tyro.cli(main))
