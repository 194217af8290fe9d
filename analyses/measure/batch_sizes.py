"""Measure how an interval's share of the summed gradient depends on the number of puzzles in the batch.

The policy is a scale's untrained one. The responses to 512 questions, sampled as in analyses/measure/base_policy.py,
are dealt into batches of 8 puzzles, then the same ones into batches of 16, and so on. Writes

    batch_sizes.csv     a row per size, batch and interval (or all): `interval_gradients` of the sum
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
"""Seed of the questions and their responses; analyses/measure/base_policy.py uses 0 to 3. A few small puzzles recur."""


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
    """Return a row per interval and one of all, for each batch of `size` puzzles."""
    prompts = batch.group_ids.unique()
    dealt = batch.deal(prompts, len(prompts) // size, torch.Generator().manual_seed(size))
    tables = [interval_gradients(policy, own).table.assign(batch=number) for number, own in enumerate(dealt)]
    # Numbers and "all": a column of parquet has one type.
    return pd.concat(tables, ignore_index=True).assign(size=size).astype({"interval": str})
