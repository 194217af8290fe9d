"""How long the optimizer steps of Lopti and of plain GRPO take on the same batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import torch

from analyses.benchmarks.trainer_loops import Size
from analyses.benchmarks.turns import read_clocks
from gradscope.objective import Updater, batch_statistics
from gradscope.policy import Policy, load_policy
from gradscope.rollouts import Response, TokenBatch, collate
from gradscope.sampling import HFSampler, batch_rows, rollout_rows
from gradscope.tasks import draw_questions, get_task
from gradscope.trainer import TrainConfig, get_preset
from gradscope.trainer.step import Update, compute_advantages, plan_update

SHARES = (0.2, 0.3, 0.4)
"""Of low-probability tokens, where η is set by them."""


def compare_lopti(size: Size, *, rounds: int, micro_batch_size: int) -> pd.DataFrame:
    """A row for plain and for Lopti at each share of low tokens, with two mini-batches; "embedded": the real policy."""
    config = TrainConfig(mini_batch_size=size.questions * size.group // 2, micro_batch_size=micro_batch_size)
    policy, batch = sampled_batch(size) if size.name == "embedded" else random_batch(size)
    batch = with_old_logprobs(policy, batch, config)
    probs = batch.old_logprobs[batch.response_mask].exp()
    etas = [0.5] if size.name == "embedded" else [float(probs.quantile(share)) for share in SHARES]
    plans = {None: config} | {eta: replace(config, lopti_eta=eta) for eta in etas}
    updates = {eta: plan_update(batch, plan, torch.Generator().manual_seed(0)) for eta, plan in plans.items()}
    seconds = time_updates(policy, updates, config, rounds)
    rows = []
    for eta, update in updates.items():
        cpu, wall = seconds[eta].T
        low = sum(part.batch.num_tokens for part in update.steps if part.name == "low")
        rows.append(
            {"method": "plain" if eta is None else "Lopti", "micro_batch": micro_batch_size, "tokens": batch.num_tokens}
            | {"cpu_s": np.median(cpu), "cpu_min": cpu.min(), "cpu_max": cpu.max(), "wall_s": np.median(wall)}
            | {"cpu_ratio": np.median(cpu / seconds[None][:, 0]), "wall_ratio": np.median(wall / seconds[None][:, 1])}
            | {"low_share": low / batch.num_tokens}
        )
    return pd.DataFrame(rows)


def time_updates(policy: Policy, updates: dict[Any, Update], config: TrainConfig, rounds: int) -> dict[Any, np.ndarray]:
    """CPU and wall seconds of all optimizer steps in each round [rounds, 2], after one that is not counted."""
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=config.learning_rate)
    updater = Updater(policy.model, optimizer, policy.device, config.micro_batch_size, config.max_grad_norm)
    seconds: dict[Any, list[np.ndarray]] = {key: [] for key in updates}
    for _ in range(rounds + 1):
        for key, update in updates.items():
            start = read_clocks()
            for part in update.steps:
                updater.step(part, update.settings)
            seconds[key].append(read_clocks() - start)
    return {key: np.array(values[1:]) for key, values in seconds.items()}


def random_batch(size: Size) -> tuple[Policy, TokenBatch]:
    """Random weights, prompts and responses; those of a group have one prompt."""
    from transformers import Qwen2ForCausalLM

    torch.manual_seed(0)
    policy = Policy(Qwen2ForCausalLM(size.config).eval(), None, "model.layers")
    prompts = torch.randint(1, size.vocab, (size.questions, size.prompt)).tolist()
    rows = torch.randint(1, size.vocab, (size.questions * size.group, size.response)).tolist()
    responses = [
        Response(prompts[k // size.group], row, k // size.group, temperature=0.7, reward=float(k % 3))
        for k, row in enumerate(rows)
    ]
    return policy, collate(responses)


def sampled_batch(size: Size) -> tuple[Policy, TokenBatch]:
    """The policy embedded-certain and its responses to puzzles."""
    policy, config = load_policy("embedded-certain", dtype="float32", device="cpu"), get_preset("kk-embedded")
    task = get_task(config.task)
    rows = rollout_rows(
        policy,
        draw_questions(task, size.questions, seed=0, people=config.people),
        sampler=HFSampler(policy, progress=False),
        n=size.group,
        temperature=config.temperature,
        max_new_tokens=config.max_new_tokens,
        seed=0,
        task=task,
    )
    return policy, batch_rows(rows)


def with_old_logprobs(policy: Policy, batch: TokenBatch, config: TrainConfig) -> TokenBatch:
    """With π_old = π_ref = the policy, and advantages."""
    size = config.micro_batch_size
    old = batch_statistics(policy.model, batch, micro_batch_size=size, device=policy.device).logprob
    batch = replace(batch, old_logprobs=old, ref_logprobs=old)
    return replace(batch, advantages=compute_advantages(batch, config))
