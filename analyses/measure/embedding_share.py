"""Measures how much of a token's gradient is that of the table which embedding and head share.

The embedded policy (8 × 8 puzzles at T = 0.7, 64 tokens of each interval), SmolLM2-135M-Instruct (two responses to
each of the first 8 problems of analyses/measure/real_language.py, 16 of each) and Gemma 3 270M (two answers of at most
40 tokens to each of these problems, at T = 1, 16 of each). Both pretrained ones have weights de-quantised from four
bits and are made by analyses/recipes/pretrained.py. Leaves

    tokens.csv      a row per measured token: both norms, and one over its chance of being measured
    policies.csv    a row per policy: its parameters, and those of the table
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pandas as pd
import torch

from analyses.common.experiments import WORK, configure
from analyses.common.in_training import FRESH, PLACE
from analyses.common.measurements import folder, keep, part
from analyses.measure import real_language
from analyses.measure.base_policy import sample_batch
from gradscope import load_policy
from gradscope.gradients import PARAMETERS, measure as measure_tokens, sampling_weights
from gradscope.policy import Policy
from gradscope.rollouts import Response, TokenBatch, collate

GEMMA = WORK / "gemma3"
TABLE = "table_grad_norm"


def measure(out: Path) -> None:
    """Measure the three policies, and keep the tables."""
    makers: dict[str, tuple[Callable[[], tuple[Policy, TokenBatch]], int]] = {
        "embedded": (_embedded, 64),
        "SmolLM2": (_smollm2, 16),
        "Gemma 3": (_gemma, 16),
    }
    frames, sizes = [], []
    for name, (make, tokens_per_interval) in makers.items():
        policy, batch = make()
        found = part(out, name, lambda p=policy, b=batch, n=tokens_per_interval: tabulate(p, b, n))
        frames.append(found.assign(policy=name))
        table = policy.model.get_input_embeddings().weight.numel()
        sizes.append({"policy": name, "parameters": policy.model.num_parameters(), "table": table})
    keep(out, {"tokens.csv": pd.concat(frames), "policies.csv": pd.DataFrame(sizes)})


def tabulate(policy: Policy, batch: TokenBatch, tokens_per_interval: int) -> pd.DataFrame:
    """A row per measured token of a stratified sample: its norm, and that of the embedding's gradient alone."""
    settings = {"tokens_per_interval": tokens_per_interval, "sample": "stratified", "per_module": True}
    return slim(policy, measure_tokens(policy, batch, self_check=False, **settings))


def slim(policy: Policy, tokens: pd.DataFrame) -> pd.DataFrame:
    """The measured tokens, and the columns that are drawn."""
    embedding = policy.model.get_input_embeddings()
    (name,) = (name for name, module in policy.model.named_modules() if module is embedding)
    tokens = tokens.assign(weight=sampling_weights(tokens), **{TABLE: tokens[f"{PARAMETERS}.{name}"]})
    kept = ["group", "interval", "prob", "weight", PARAMETERS, TABLE]
    return tokens[kept][tokens[PARAMETERS].notna()].reset_index(drop=True)


def _embedded() -> tuple[Policy, TokenBatch]:
    policy = load_policy(configure("cpu", *PLACE).model)
    return policy, sample_batch(policy, 8, 8, FRESH)


def _smollm2(prompts: int = 8, responses: int = 2) -> tuple[Policy, TokenBatch]:
    policy, batch = real_language.inputs()
    ids = batch.group_ids.tolist()
    rows = [row for row, group in enumerate(ids) if ids[:row].count(group) < responses]
    return policy, batch.select(rows).of_prompts(batch.group_ids.unique()[:prompts])


def _gemma(prompts: int = 8, responses: int = 2, max_new_tokens: int = 40) -> tuple[Policy, TokenBatch]:
    """Gemma is a base model without a chat template: it answers after a colon."""
    torch.manual_seed(0)
    policy = load_policy(GEMMA)
    problems = pd.read_parquet(folder("real_language") / real_language.ROLLOUTS)["problem"].unique()
    sampled = []
    settings = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_new_tokens": max_new_tokens}
    stops = {policy.tokenizer.eos_token_id, policy.tokenizer.pad_token_id}
    for group, problem in enumerate(problems[:prompts]):
        ids = policy.tokenizer(f"Question: {problem}\nAnswer:", return_tensors="pt").input_ids
        for row in policy.model.generate(ids.repeat(responses, 1), **settings):
            new = row[ids.shape[1] :].tolist()
            length = next((i + 1 for i, token in enumerate(new) if token in stops), len(new))
            sampled.append(Response(ids[0].tolist(), new[:length], group))
    return policy, collate(sampled)
