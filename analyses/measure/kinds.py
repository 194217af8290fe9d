"""Measure how much of the summed gradient comes from mere wording, steering words, and content.

Each of the four batches of analyses/measure/base_policy.py is measured by itself. Writes

    kinds.csv       a row per batch, kind of token (or all) and interval: `interval_gradients` of their sum
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from tqdm import tqdm

from analyses.common.experiments import configure
from analyses.common.in_training import PLACE
from analyses.common.measurements import keep, part
from analyses.measure.base_policy import sample_batch
from analyses.recipes.hasty_analysis import KINDS, kinds_of
from gradscope import load_policy
from gradscope.gradients import interval_gradients
from gradscope.intervals import assign_intervals, interval_labels
from gradscope.objective import batch_statistics
from gradscope.policy import Policy
from gradscope.rollouts import TokenBatch

WHOLE = "all kinds"


def measure(out: Path, *, batches: int = 4, questions: int = 64, responses: int = 8) -> None:
    """Sample the batches again, sum their gradients by kind, and keep the table."""
    policy = load_policy(configure("cpu", *PLACE).model)
    frames = []
    for seed in tqdm(range(batches), "batches"):
        make = partial(tabulate, policy, sample_batch(policy, questions, responses, seed))
        frames.append(part(out, f"kinds-{seed}", make).assign(batch=seed))
    keep(out, {"kinds.csv": pd.concat(frames)}, batches=batches, questions=questions, responses=responses)


def tabulate(policy: Policy, batch: TokenBatch) -> pd.DataFrame:
    """Return a row per interval for each kind and for all kinds, the latter with one of all intervals."""
    labels = interval_labels()
    finer = np.linspace(0, 1, len(KINDS) * len(labels) + 1).tolist()  # as many groups; their edges mean nothing
    parts = interval_gradients(policy, batch, intervals=assign_groups(policy, batch), edges=finer).table
    whole = interval_gradients(policy, batch).table.assign(kind=WHOLE)
    named = [(kind, label) for label in labels for kind in KINDS]
    parts = parts.iloc[: len(named)].drop(columns=["interval", "label"])
    kinds, own = zip(*named, strict=True)
    parts = parts.assign(kind=kinds, label=own, interval=[str(labels.index(label)) for label in own])
    return pd.concat([whole.astype({"interval": str}), parts], ignore_index=True)


def assign_groups(policy: Policy, batch: TokenBatch) -> torch.Tensor:
    """Return [B, S]: for each kept token, three times its interval plus the index of its kind in KINDS."""
    groups = torch.zeros(batch.input_ids.shape, dtype=torch.long)
    probs = batch_statistics(policy.model, batch, micro_batch_size=8, device=policy.device).logprob.double().exp()
    for row, mask in enumerate(batch.response_mask):
        tokens = [policy.decode([i]) for i in batch.input_ids[row][mask].tolist()]
        intervals = assign_intervals(probs[row][mask].clamp(max=1.0).numpy())
        kinds = [KINDS.index(kind) for kind in kinds_of(tokens)]
        groups[row][mask] = torch.from_numpy(len(KINDS) * intervals + kinds)
    return groups
