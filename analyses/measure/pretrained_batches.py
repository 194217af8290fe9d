"""Measure a pretrained policy on batches of word problems, for Fig. 1 of the paper on real language.

SmolLM2-135M-Instruct, de-quantised from four bits, after its warm start on worked answers
(analyses/recipes/word_problems_policy.py), at temperatures 1 and 0.7; POLICIES names its folder below WORK. It samples
four batches of 8 problems × 8 responses of at most 48 tokens. On each batch one SGD step (learning rate 1e-3, gradient
clipped to norm 1, as in the paper) is taken from the same weights on all tokens, on those of [0, ¼) alone, and on those
of [¾, 1] alone. Writes, with columns `policy` and `temperature`

    tokens.parquet      the token tables, 50 tokens of each interval and batch measured below the logits
    moves.parquet       a row per token: how far each step moved π
    similarity.csv      how similar a selective step and the whole one are outside its interval, by batch
    gradients.csv       the intervals' summed gradients, batch by batch
    samples.csv         what was sampled: responses, tokens, accuracy
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pandas as pd
import torch

from analyses.common.experiments import WORK
from analyses.common.in_training import pool
from analyses.common.measurements import keep, part
from analyses.measure import base_policy, updates
from gradscope import load_policy, measure as measure_tokens
from gradscope.gradients import interval_gradients
from gradscope.policy import Policy
from gradscope.rollouts import TokenBatch
from gradscope.sampling import HFSampler, batch_rows, rollout_rows
from gradscope.tasks import get_task
from gradscope.updates import apply_updates, movement_table

POLICIES = {
    ("smollm2-words", 1.0): "word-problems",
    ("smollm2-words", 0.7): "word-problems",
}
"""(checkpoint folder, temperature): task."""
RESPONSES = 8
LIMIT = 48
"""Maximum tokens per response."""
TABLES = {
    "tokens": "tokens.parquet",
    "moves": "moves.parquet",
    "similarity": "similarity.csv",
    "gradients": "gradients.csv",
    "samples": "samples.csv",
}


def measure(out: Path, *, batches: int = 4, questions: int = 8, tokens_per_interval: int = 50) -> None:
    """Sample the batches, measure them, take the steps, and keep the tables."""
    found: dict[str, list[pd.DataFrame]] = {name: [] for name in TABLES}
    for (name, temperature), task in POLICIES.items():
        policy = load_policy(WORK / name)
        place, frames = f"{name}-{temperature}", {}
        for seed in range(batches):
            settings = {"n": RESPONSES, "temperature": temperature, "max_new_tokens": LIMIT}
            draw = partial(sample, policy, task, questions, seed, **settings)
            frames[seed] = part(out, f"rows-{place}-{seed}", draw)
        samples = {seed: as_batch(rows) for seed, rows in frames.items()}
        tables = measure_policy(out, place, policy, samples, questions, tokens_per_interval)
        tables["samples"] = pd.concat(describe(rows, seed) for seed, rows in frames.items())
        for table, rows in tables.items():
            found[table].append(rows.assign(policy=name, temperature=temperature))
    facts = {"batches": batches, "questions": questions, "responses": RESPONSES, "limit": LIMIT}
    sizes = {name: load_policy(WORK / name).vocab_size for name, _ in POLICIES}
    keep(out, {TABLES[name]: pd.concat(frames) for name, frames in found.items()}, **facts, vocab_size=sizes)


def sample(
    policy: Policy, name: str, questions: int, seed: int, *, n: int, temperature: float, max_new_tokens: int
) -> pd.DataFrame:
    """Sample n responses to each of a task's questions, a row each."""
    task, settings = get_task(name), {"n": n, "temperature": temperature, "max_new_tokens": max_new_tokens}
    asked, sampler = task.questions(questions, seed=seed), HFSampler(policy, batch_size=64)
    return pd.DataFrame(rollout_rows(policy, asked, task=task, sampler=sampler, seed=seed, **settings))


def as_batch(rows: pd.DataFrame) -> TokenBatch:
    """Turn the rows into a batch."""
    ids = {name: rows[name].map(list) for name in ("prompt_ids", "response_ids")}
    return batch_rows(rows.assign(**ids).to_dict("records"))


def describe(rows: pd.DataFrame, batch: int) -> pd.DataFrame:
    """Return a row: responses, tokens, share of right ones, and problems whose responses differ in reward."""
    unlike = int((rows.groupby("group")["reward"].nunique() > 1).sum())
    tokens, accuracy = int(rows["response_ids"].map(len).sum()), float(rows["correct"].mean())
    row = {"batch": batch, "responses": len(rows), "tokens": tokens, "accuracy": accuracy, "unlike_prompts": unlike}
    return pd.DataFrame([row])


def measure_policy(
    out: Path, place: str, policy: Policy, samples: dict[int, TokenBatch], questions: int, tokens_per_interval: int
) -> dict[str, pd.DataFrame]:
    """Return the tables of one policy's batches."""
    tokens, moved, gradients = [], [], []
    for seed, batch in samples.items():
        settings = {"tokens_per_interval": tokens_per_interval, "seed": seed, "sample": "stratified"}
        frame = part(out, f"tokens-{place}-{seed}", partial(measure_tokens, policy, batch, **settings))
        tokens.append(frame.assign(group=frame["group"] + seed * questions, batch=seed))
        take = partial(apply_updates, policy, batch, list(updates.UPDATES))
        moved.append(part(out, f"moves-{place}-{seed}", lambda take=take: movement_table(take())))
        draw = partial(interval_gradients, policy, batch, generator=torch.Generator().manual_seed(seed))
        sums = part(out, f"sums-{place}-{seed}", lambda draw=draw: draw().table.astype({"interval": str}))
        gradients.append(sums.assign(batch=seed))
        print(f"{place}: batch {seed + 1} of {len(samples)}", flush=True)
    pooled = pool(moved)
    return {
        "tokens": base_policy.slim(pd.concat(tokens, ignore_index=True)),
        "moves": updates.slim(pooled),
        "similarity": updates.compare(pooled),
        "gradients": pd.concat(gradients),
    }
