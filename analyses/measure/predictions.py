"""Predict whose steps raise the reward on other prompts, before any branch is run (analyses/measure/branches.py).

At each origin (analyses/common/branches.py), for each replicate and method, Δθ is the method's first step as the
trainer takes it, under the checkpoint's own AdamW. The prediction is the first-order gain in expected reward on other
prompts, from 128 validation puzzles × 8 responses of the checkpoint,

    gain = 1/B · Σ_i Â_i Σ_t ⟨∇ log π(o_it), Δθ⟩,      Â_i = reward minus the mean of the prompt's other responses,

which is an unbiased estimate of ⟨∇ E[reward], Δθ⟩. Writes

    predictions.csv     a row per origin, replicate and method: gain, its standard error over prompts, weights' hash
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from tqdm import tqdm

import analyses.common.puzzles  # noqa: F401  (registers its tasks)
from analyses.common.branches import REPLICATES, VARIANTS, Origin, list_origins, take_branch
from analyses.common.measurements import keep, part
from gradscope import load_policy
from gradscope.gradients import TokenJacobian, Vectors
from gradscope.policy import Policy, flat_slices
from gradscope.rollouts import TokenBatch
from gradscope.sampling import HFSampler, batch_rows, rollout_rows
from gradscope.tasks import get_task

PROMPTS, RESPONSES, TEMPERATURE = 128, 8, 0.7


def measure(out: Path, *, scale: str = "cpu") -> None:
    """Predict at all origins of a scale, and keep the table."""
    frames = [
        part(out, f"{origin.seed}-{origin.step}-{origin.weights}", partial(predict, origin))
        for origin in tqdm(list(list_origins(scale)), f"origins, {scale}")
    ]
    keep(out, {"predictions.csv": pd.concat(frames)}, prompts=PROMPTS, responses=RESPONSES, replicates=REPLICATES)


def predict(origin: Origin) -> pd.DataFrame:
    """Return a row per replicate and method."""
    policy = load_policy(origin.folder)
    batch, start = sample_others(policy), flatten(policy.model)
    pairs = [(replicate, variant) for replicate in range(REPLICATES) for variant in VARIANTS]
    ends = (flatten(load_policy(take_branch(origin, variant, replicate, 1)).model) for replicate, variant in pairs)
    gains = gain_by_prompt(policy, batch, torch.stack([end - start for end in ends]))
    rows = pd.DataFrame(pairs, columns=["replicate", "variant"])
    rows = rows.assign(gain=gains.mean(1), error=gains.std(1, ddof=1) / np.sqrt(gains.shape[1]))
    return rows.assign(seed=origin.seed, step=origin.step, weights=origin.weights)


def sample_others(policy: Policy) -> TokenBatch:
    """Sample responses to validation puzzles."""
    task = get_task("kk-compact-validation")
    questions = task.questions(PROMPTS, seed=4, people=(2, 3, 4, 5))
    sampler = HFSampler(policy, batch_size=64, progress=False)
    settings = {"n": RESPONSES, "temperature": TEMPERATURE, "max_new_tokens": 400, "seed": 4}
    return batch_rows(rollout_rows(policy, questions, task=task, sampler=sampler, **settings))


def flatten(model: nn.Module) -> Tensor:
    """Concatenate all parameters in their order: [P]."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def gain_by_prompt(policy: Policy, batch: TokenBatch, directions: Tensor) -> np.ndarray:
    """Return [C, prompts]: each direction's gain, estimated from each prompt's responses."""
    J = TokenJacobian(policy, batch)
    changes = J.jvp(Vectors(directions, flat_slices(policy.model))).logprob
    moved = J.spread(changes).double().sum(-1)  # [C, B], nats of whole responses
    found = []
    for group in batch.group_ids.unique():
        own = batch.group_ids == group
        rewards = batch.rewards[own].double()
        advantages = (rewards - rewards.mean()) * len(rewards) / (len(rewards) - 1)
        found.append((moved[:, own] * advantages).mean(1))
    return torch.stack(found, 1).numpy()
