"""The responses of one step: choosing questions, sampling by all processes, grading, batching."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gradscope.errors import InputError
from gradscope.policy import Policy
from gradscope.rollouts import TokenBatch, write_rollouts
from gradscope.runs import Processes, writing
from gradscope.sampling import Sampler, batch_rows, rollout_rows
from gradscope.tasks import Question, Task, draw_questions, get_task, questions_hash
from gradscope.trainer.config import TrainConfig

ROLLOUTS = "rollouts"
"""Folder of a run for its responses."""
RESPONSES, CONTROL = 1, 2
"""Separate random streams of a step, for sampling and for a control's permutation, mixed into its seeds."""


@dataclass(frozen=True)
class Rollout:
    """The responses sampled in one step."""

    rows: list[dict[str, Any]]
    """A row per response, in the native format, with correct, format_ok, finished and level."""
    batch: TokenBatch
    """The same responses, with sampler_logprobs; π_old is still unknown."""


class Questions:
    """The questions of each step, determined by the seed and the step."""

    def __init__(self, task: Task, config: TrainConfig) -> None:
        self.task, self.config = task, config
        self.options = {"people": config.people, "files": config.data}
        self.stored = draw_questions(task, None, seed=config.seed, **self.options) if config.data else None
        if self.stored is None and config.epochs is not None:
            raise InputError("epochs count passes over data, but there is none; give steps instead, or data")

    @property
    def hash(self) -> str | None:
        """Hash the stored questions and their answers (SHA-256); None if the task generates them."""
        return None if self.stored is None else questions_hash(self.stored)

    @property
    def steps(self) -> int:
        """Return the number of steps of the whole run."""
        limits = [] if self.config.steps is None else [self.config.steps]
        if self.config.epochs is not None:
            limits.append(self.config.epochs * len(self.stored) // self.config.questions_per_step)
        if not limits:
            raise InputError("neither steps nor epochs are given; give one of them")
        if min(limits) < 1:
            raise InputError(
                f"{len(self.stored)} questions do not fill one step of {self.config.questions_per_step}; give more "
                "epochs or data, or fewer questions_per_step"
            )
        return min(limits)

    def of_step(self, index: int) -> list[Question]:
        """Return the questions of a step, counted from 0: new ones, or the next of the data, reshuffled each epoch."""
        count = self.config.questions_per_step
        if self.stored is None:
            return draw_questions(self.task, count, seed=derive_seed(self.config.seed, index), **self.options)
        places = range(index * count, (index + 1) * count)
        size = len(self.stored)
        orders = {epoch: self._order(epoch) for epoch in {place // size for place in places}}
        return [self.stored[orders[place // size][place % size]] for place in places]

    def _order(self, epoch: int) -> list[int]:
        return np.random.default_rng([self.config.seed, epoch]).permutation(len(self.stored)).tolist()


def derive_seed(*keys: int) -> int:
    """Mix several numbers into a seed of 62 bits. Trailing zeros are ignored: (s, 0) and (s) give the same seed.

    >>> derive_seed(0, 1) == derive_seed(1, 0), derive_seed(5, 0) == derive_seed(5)
    (False, True)
    """
    return int(np.random.SeedSequence(keys).generate_state(1, np.uint64)[0]) >> 2  # numpy 1 cannot shift a uint64


def make_generator(config: TrainConfig, index: int) -> torch.Generator:
    """Make the generator for a control's permutation at step `index`."""
    return torch.Generator().manual_seed(derive_seed(config.seed, index, CONTROL))


def sample_rollout(
    policy: Policy, sampler: Sampler, questions: list[Question], config: TrainConfig, index: int, processes: Processes
) -> Rollout:
    """Sample and grade group_size responses to each question of step `index`; the processes share the questions.

    Raises InputError, in all processes, if one of them cannot sample or grade, or if no response of the first step
    ended by itself.
    """
    with processes.together():
        mine = _sample_rows(policy, sampler, questions, config, index, processes)
    rows = sorted(processes.gather(mine), key=lambda row: row["group"])
    if index == 0 and not any(row["finished"] for row in rows):
        raise InputError(
            f"all {len(rows)} responses were cut off at max_new_tokens = {config.max_new_tokens} or at the policy's "
            "context, so none reached its answer; raise max_new_tokens"
        )
    batch = batch_rows(rows, on_policy=False)
    # Rows hold the sampler's log-probabilities as old_logprobs, as logs do; here that name is reserved for π_old.
    return Rollout(rows, replace(batch, old_logprobs=None, sampler_logprobs=batch.old_logprobs))


def _sample_rows(
    policy: Policy, sampler: Sampler, questions: list[Question], config: TrainConfig, index: int, processes: Processes
) -> list[dict[str, Any]]:
    """Sample this process's share of the responses, grouped by the index of their question."""
    rank, count = processes.rank, processes.count
    rows = rollout_rows(
        policy,
        questions[rank::count],
        sampler=sampler,
        n=config.group_size,
        temperature=config.temperature,
        max_new_tokens=config.max_new_tokens,
        seed=derive_seed(config.seed, index, rank, RESPONSES),
        task=get_task(config.task),
    )
    return [row | {"group": rank + count * row["group"]} for row in rows]


def rollout_metrics(rollout: Rollout) -> dict[str, float]:
    """Summarize the responses by means; format_rate is NaN for tasks without a format."""
    rewards = rollout.batch.rewards
    formats = [row["format_ok"] for row in rollout.rows if row["format_ok"] is not None]
    lengths = [len(row["response_ids"]) for row in rollout.rows]
    # A group with equal rewards has zero advantages under GRPO.
    spread = [rewards[rollout.batch.group_ids == g].unique().numel() for g in rollout.batch.group_ids.unique()]
    return {
        "reward_mean": float(rewards.mean()),
        "reward_sd": float(rewards.std()) if len(rewards) > 1 else 0.0,
        "accuracy": _mean([row["correct"] for row in rollout.rows]),
        "format_rate": _mean(formats),
        "response_length": _mean(lengths),
        "truncated": _mean([not row["finished"] for row in rollout.rows]),
        "equal_reward_groups": _mean([count == 1 for count in spread]),
        "num_tokens": sum(lengths),
    }


def write_step(out: Path, number: int, rows: Sequence[dict[str, Any]], batch: TokenBatch, processes: Processes) -> None:
    """Write the responses of a step, counted from 1, in the native format, with the batch's advantages and log π.

    The advantages exclude Reweight's factor, which is part of the loss.
    """
    found = {"old_logprobs": batch.old_logprobs, "advantage": batch.advantages, "ref_logprobs": batch.ref_logprobs}
    with processes.together():
        if not processes.is_main:
            return
        with writing(out / ROLLOUTS):
            (out / ROLLOUTS).mkdir(exist_ok=True)
            kept = []
            for i, row in enumerate(rows):
                mask = batch.response_mask[i]
                known = {name: values[i][mask].tolist() for name, values in found.items() if values is not None}
                kept.append(row | {"sampler_logprobs": row["old_logprobs"]} | known | {"step": number})
            write_rollouts(out / ROLLOUTS / f"step-{number:06d}.parquet", kept)


def _mean(values: Sequence[bool | int | float]) -> float:
    return float(sum(values) / len(values)) if values else math.nan
