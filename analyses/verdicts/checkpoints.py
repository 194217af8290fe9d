"""Counts false verdicts on real checkpoints, whose truth is that of 2,000 prompts.

    python -m analyses.verdicts.checkpoints [--runs runs/verdicts] [--out figures/verdicts_checkpoints.csv]

Five checkpoints of each of two GRPO runs of the embedded policy (trained here first, where they are not there yet). At
each, 4 responses to each of 2,000 puzzles; of their tokens 3,000 of each probability bin are measured, with known
chances. All prompts together tell what is true; their 31 disjoint batches of 64 prompts are each given a verdict by the
code of `diagnose`, on the same sample of tokens. So this tries sentences on tokens, of a table that is itself a sample:
dominance, the ranking, what (1−π)² predicts, where the energy is, what norms follow. Sentences on summed gradients and
steps are tried on planted tables alone. Prints and writes the table of `planted.tabulate`, and every verdict by
checkpoint. Each checkpoint's table is kept in RUNS; what was interrupted goes on.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import tyro
from tqdm import tqdm

import gradscope
from analyses.common.script import exit_with
from analyses.verdicts.planted import Judged, diagnose_tokens, judge_tokens, tabulate

SEEDS, STEPS = (11, 12), (4, 12, 20, 28, 40)
PROMPTS, BATCH = 2_000, 64
PARTS, EACH = 10, 3_000
"""In which prompts are measured, and measured tokens of each bin in all."""
COLUMNS = ["group", "response", "position", "token", "prob", "log_one_minus_prob", "entropy", "advantage", "weight"]
COLUMNS += ["interval", "sampling_probability", "logit_grad_norm", "act_grad_norm.0", "param_grad_norm"]


def measure_checkpoint(checkpoint: Path, kept: Path) -> pd.DataFrame:
    """The sampled table of all prompts, part by part, unless it was measured before."""
    if not kept.is_file():
        policy, parts, size = gradscope.load_policy(checkpoint), [], PROMPTS // PARTS
        for part in tqdm(range(PARTS), str(checkpoint)):
            asked = {"task": "knights-knaves-compact", "questions": size, "n": 4, "temperature": 0.7}
            batch = gradscope.sample(policy, **asked, max_new_tokens=400, seed=20_000 + part)
            table = gradscope.measure(policy, batch, tokens_per_interval=EACH // PARTS, seed=part)
            parts.append(table[COLUMNS].assign(group=table["group"] + part * size))
        pd.concat(parts, ignore_index=True).to_parquet(kept)
    return pd.read_parquet(kept)


def judge_checkpoint(table: pd.DataFrame, seed: int) -> list[Judged]:
    """Every disjoint batch of 64 prompts against all prompts."""
    truth = diagnose_tokens(table, None)
    order = np.random.default_rng(seed).permutation(table["group"].unique())
    judged = []
    for number in range(len(order) // BATCH):
        rng = np.random.default_rng([seed, number])
        own = table[table["group"].isin(order[number * BATCH : (number + 1) * BATCH])]
        judged += judge_tokens(diagnose_tokens(own.reset_index(drop=True), rng), truth)
    return judged


def main(
    runs: Path = Path("runs/verdicts"),
    out: Path = Path("figures/verdicts_checkpoints.csv"),
    seeds: tuple[int, ...] = SEEDS,
) -> None:
    """runs: where checkpoints and tables are kept; out: the CSV; seeds: of the runs."""
    parts, everything = [], []
    for seed in seeds:
        run = runs / f"seed{seed}"
        gradscope.train("kk-embedded", run, steps=max(STEPS), save_every=4, seed=seed, trackers=(), resume=True)
        for step in STEPS:
            table = measure_checkpoint(run / "checkpoints" / f"step-{step:06d}", runs / f"seed{seed}-{step}.parquet")
            judged = judge_checkpoint(table, seed)
            everything += judged
            parts.append(tabulate(judged).assign(seed=seed, step=step))
            print(f"seed {seed}, step {step}\n{parts[-1].to_string(index=False)}", flush=True)
    whole = tabulate(everything)
    print(whole.to_string(index=False))
    pd.concat([whole.assign(seed="all", step="all"), *parts], ignore_index=True).to_csv(out, index=False)


if __name__ == "__main__":
    exit_with(lambda: tyro.cli(main))
