"""A policy in training, shared by the measurements of updates: 40 GRPO steps of a scale's policy, with checkpoints.

The run is the track in-training of analyses/runs.toml. It is made once, in a folder outside the repository, and resumed
if interrupted. Each checkpoint has its optimizer's state, so that a step is taken as the run would have taken it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from analyses.common.experiments import WORK, configure
from gradscope import load_policy
from gradscope.gradients import Resources
from gradscope.objective import batch_statistics, resolve_advantages
from gradscope.policy import Policy
from gradscope.rollouts import TokenBatch
from gradscope.sampling import HFSampler, batch_rows, rollout_rows
from gradscope.tasks import draw_questions, get_task
from gradscope.trainer import OPTIMIZER, TrainConfig, list_checkpoints, step_of, train
from gradscope.updates import StepSettings

PLACE = ("in-training", "grpo")
"""Track and variant."""
RUN = WORK.joinpath("cpu", *PLACE, "seed0")
FRESH = 10_000
"""First seed for batches that the run was not trained on."""


@dataclass(frozen=True)
class Moment:
    """A checkpoint of the run."""

    step: int
    policy: Policy
    reference: Policy
    """The untrained policy."""
    optimizer_state: dict[str, Any]
    """AdamW's saved `state_dict()`."""
    config: TrainConfig

    @property
    def step_settings(self) -> StepSettings:
        """Settings of the run's own optimizer step."""
        config = self.config
        return StepSettings("adamw", config.learning_rate, config.weight_decay, max_grad_norm=config.max_grad_norm)

    @property
    def resources(self) -> Resources:
        """Its micro-batches, and unlimited memory."""
        return Resources(1 << 62, micro_batch=self.config.micro_batch_size)

    def sample(self, questions: int, *, seed: int, responses: int = 8) -> TokenBatch:
        """Sample a GRPO batch as the run does, with advantages, π_old (the policy's own) and π_ref."""
        config, task = self.config, get_task(self.config.task)
        rows = rollout_rows(
            self.policy,
            draw_questions(task, questions, seed=seed, people=config.people),
            task=task,
            sampler=HFSampler(self.policy, batch_size=config.sampling_batch_size, progress=False),
            n=responses,
            temperature=config.temperature,
            max_new_tokens=config.max_new_tokens,
            seed=seed,
        )
        batch = batch_rows(rows)
        settings = {"micro_batch_size": config.micro_batch_size, "device": self.policy.device}
        old, ref = (batch_statistics(p.model, batch, **settings).logprob for p in (self.policy, self.reference))
        return replace(batch, advantages=resolve_advantages(batch), old_logprobs=old, ref_logprobs=ref)


def moments(scale: str = "cpu", *, run: Path | None = None, last: int | None = None) -> list[Moment]:
    """Return the checkpoints of the scale's run, oldest first, or only the `last` ones; trains them first if missing.

    run: its folder, if not that of analyses/reproduce.py.
    """
    config = configure(scale, *PLACE)
    run = run or WORK.joinpath(scale, *PLACE, "seed0")
    there = list_checkpoints(run)
    # A finished run is not opened again: that would lock it, and measurements read it side by side.
    if not there or step_of(there[-1]) < config.steps:
        train(config, run, resume=True)
    reference = load_policy(config.model)
    return [
        Moment(
            step_of(folder),
            load_policy(folder),
            reference,
            torch.load(folder / OPTIMIZER, weights_only=True),
            config,
        )
        for folder in list_checkpoints(run)[-last if last else 0 :]
    ]


def pool(tables: list[pd.DataFrame]) -> pd.DataFrame:
    """Concatenate tables of several batches, numbered in a column `batch`."""
    return pd.concat([table.assign(batch=number) for number, table in enumerate(tables)], ignore_index=True)
