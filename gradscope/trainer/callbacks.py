"""What can be watched while a run trains: a step before and after its update, measured by the instrument's own code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from gradscope.gradients import Resources, interval_gradients
from gradscope.objective import LossSettings, TokenStatistics
from gradscope.policy import Policy
from gradscope.rollouts import TokenBatch
from gradscope.trainer.config import TrainConfig
from gradscope.updates import batch_direction_shares


@dataclass
class Step:
    """One step as an `on_step` callback sees it: before its update and, behind the callback's yield, after it."""

    number: int
    """1, 2, …"""
    policy: Policy
    batch: TokenBatch
    """With the advantages that are trained on, old_logprobs and, where there is a reference, ref_logprobs."""
    statistics: TokenStatistics
    """Statistics of the batch's tokens before the update."""
    settings: LossSettings
    """Settings of the loss that is trained."""
    config: TrainConfig
    score: Callable[[TokenBatch], TokenStatistics]
    """The statistics of a batch's tokens under the policy as it is, in the precision of training."""
    metrics: dict[str, Any] = field(default_factory=dict)
    """The step's record; what is added here is logged."""


OnStep = Callable[[Step], AbstractContextManager]
"""A context manager around each update, as contextlib.contextmanager makes one of a generator with one yield."""


@contextmanager
def measure_gradients(step: Step) -> Iterator[None]:
    """Every `gradients_every` steps: norms and shares of the intervals' gradients, and right-direction shares (Fig. 3).

    Intervals are those of π_old, gradients those of the loss on the whole batch before the update, over all weights
    (frozen ones too); tokens that mask_probs leaves out are measured like all others, and control matched-norm's
    rescaling is not in them.
    """
    config = step.config
    if (step.number - 1) % config.gradients_every:
        yield
        return
    gradients = interval_gradients(
        step.policy, step.batch, loss=step.settings, resources=Resources(micro_batch=config.micro_batch_size)
    ).table
    for row in gradients.itertuples():
        step.metrics[f"interval_norm_{row.interval}"] = float(row.norm)
        step.metrics[f"interval_share_{row.interval}"] = float(row.share)
    yield
    for row in batch_direction_shares(step.statistics, step.score(step.batch), step.batch).itertuples():
        step.metrics[f"right_direction_{row.sign}_{row.interval}"] = float(row.share)
