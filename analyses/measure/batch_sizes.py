"""Measures how an interval's share of the summed gradient depends on how many puzzles the batch has.

The policy of a scale before any training. The responses to 512 questions, sampled as in
analyses/measure/base_policy.py, are dealt into batches of 8 puzzles, the same into batches of 16, and so on. Leaves

    batch_sizes.csv     a row per size, batch and interval (or all): what `interval_gradients` says of the sum
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pandas as pd
import torch
from tqdm import tqdm

from analyses.common.experiments import configure
from analyses.common.in_training import PLACE
from analyses.common.measurements import keep, part
from analyses.measure.base_policy import sample_batch
from gradscope import load_policy
from gradscope.gradients import interval_gradients
from gradscope.policy import Policy
from gradscope.rollouts import TokenBatch

SEED = 100
"""Of the questions and their responses; analyses/measure/base_policy.py takes 0 to 3. A few small puzzles recur."""


def measure(
    out: Path,
    *,
    scale: str = "cpu",
    questions: int = 512,
    responses: int = 8,
    sizes: tuple[int, ...] = (8, 16, 32, 64, 128),
) -> None:
    """Sample the responses, deal them into batches of each size, and keep the sums."""
    policy = load_policy(configure(scale, *PLACE).model)
    batch = sample_batch(policy, questions, responses, SEED)
    frames = [part(out, f"size-{size}", partial(tabulate, policy, batch, size)) for size in tqdm(sizes, "sizes")]
    keep(out, {"batch_sizes.csv": pd.concat(frames)}, questions=questions, responses=responses)


def tabulate(policy: Policy, batch: TokenBatch, size: int) -> pd.DataFrame:
    """A row per interval, and one of all, of each batch of `size` puzzles."""
    prompts = batch.group_ids.unique()
    dealt = batch.deal(prompts, len(prompts) // size, torch.Generator().manual_seed(size))
    tables = [interval_gradients(policy, own).table.assign(batch=number) for number, own in enumerate(dealt)]
    # Numbers and "all": a column of parquet has one type.
    return pd.concat(tables, ignore_index=True).assign(size=size).astype({"interval": str})
