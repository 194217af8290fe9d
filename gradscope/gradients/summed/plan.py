"""What summed gradients by prompt cost, before any is made."""

from __future__ import annotations

from math import ceil

import torch

from gradscope.gradients.gram import SumsPlan, Way
from gradscope.gradients.jacobian import TokenJacobian
from gradscope.gradients.resources import Resources
from gradscope.policy import Policy
from gradscope.rollouts import TokenBatch


def plan_batch_sums(
    policy: Policy,
    batch: TokenBatch,
    *,
    memory: int,
    keeps_prompts: bool,
    intervals: int = 4,
    metric: bool = False,
    way: Way | None = None,
    micro_batch_size: int = 8,
    dtype: torch.dtype | None = None,
    device: str | None = None,
) -> SumsPlan:
    """`TokenJacobian.plan_gram` for a row per interval; keeps_prompts: whether each prompt's are kept, or of halves."""
    J = TokenJacobian(policy, batch, Resources(memory, micro_batch=micro_batch_size))
    rows, pairs = (intervals, "all") if keeps_prompts else (2 * intervals, "within")
    return J.plan_gram(rows, pairs=pairs, metric=metric, way=way)


def largest_share(prompts: int, processes: int) -> float:
    """The part of the prompts that the busiest of several processes has."""
    return ceil(prompts / processes) / max(1, prompts)
