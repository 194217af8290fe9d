"""Measure a scale's untrained policy, for Fig. 2 of the paper and the base policy's Fig. 1 (a, b, d).

Four batches of 64 Knights & Knaves questions (2–5 people), 8 responses each at temperature 0.7, as in the paper. The
token table is a stratified sample of each batch: 400 tokens of each interval are measured below the logits; all others
keep their rows. Norms of summed gradients are means over the batches. The reference is the policy itself, so the KL
term is 0, as at a run's first step. Writes

    tokens.parquet      the token tables of all batches, concatenated
    gradients.csv       the intervals' summed gradients, means and standard deviations over the batches
    cosines.csv         their cosines, means
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
from tqdm import tqdm

from analyses.common.experiments import configure
from analyses.common.in_training import PLACE
from analyses.common.measurements import keep, part
from analyses.common.several_batches import mean_gradients
from gradscope import load_policy, measure as measure_tokens
from gradscope.gradients import LAYER, LOGITS, PARAMETERS
from gradscope.policy import Policy
from gradscope.rollouts import TokenBatch
from gradscope.sampling import HFSampler, batch_rows, rollout_rows
from gradscope.tasks import get_task

TEMPERATURE = 0.7
KEPT = ["batch", "group", "prob", "log_one_minus_prob", "interval", "advantage", "weight", LOGITS, PARAMETERS]
"""Columns of the token table, besides the layers' norms."""


def measure(
    out: Path,
    *,
    scale: str = "cpu",
    batches: int = 4,
    questions: int = 64,
    responses: int = 8,
    tokens_per_interval: int = 400,
) -> None:
    """Sample the batches, measure their tokens and summed gradients, and keep the tables."""
    policy = load_policy(configure(scale, *PLACE).model)
    samples = [sample_batch(policy, questions, responses, seed) for seed in range(batches)]
    frames = []
    for seed, batch in enumerate(tqdm(samples, "batches")):
        # Equal probabilities within an interval: figures and fits of these tables do not weight the measured tokens.
        settings = {"tokens_per_interval": tokens_per_interval, "seed": seed, "sample": "stratified"}
        frame = part(out, f"tokens-{seed}", partial(measure_tokens, policy, batch, **settings))
        frames.append(frame.assign(group=frame["group"] + seed * questions, batch=seed))
    gradients, cosines = mean_gradients(policy, samples)
    tables = {
        "tokens.parquet": slim(pd.concat(frames, ignore_index=True)),
        "gradients.csv": gradients,
        "cosines.csv": cosines,
    }
    facts = {"batches": batches, "questions": questions, "responses": responses, "temperature": TEMPERATURE}
    keep(out, tables, **facts, tokens_per_interval=tokens_per_interval, vocab_size=policy.vocab_size)


def sample_batch(policy: Policy, questions: int, responses: int, seed: int) -> TokenBatch:
    """One GRPO batch, sampled from the policy."""
    task = get_task("knights-knaves-compact")
    sampler = HFSampler(policy, batch_size=128)
    settings = {"n": responses, "temperature": TEMPERATURE, "max_new_tokens": 400, "seed": seed}
    rows = rollout_rows(policy, task.questions(questions, seed=seed), task=task, sampler=sampler, **settings)
    return batch_rows(rows)


def slim(tokens: pd.DataFrame) -> pd.DataFrame:
    """Keep the columns that figures and their statistics read, in the order of the tokens."""
    layers = [column for column in tokens if column.startswith(LAYER)]
    return tokens[[*KEPT, *layers]].astype({"batch": np.int8, "group": np.int16, "interval": np.int8})
