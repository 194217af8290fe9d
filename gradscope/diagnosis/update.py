"""The update that is diagnosed: the tokens' weights, the prompts that have any, and the words for its sign."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from gradscope.objective import LossSettings
from gradscope.resampling import Supply
from gradscope.rollouts import TokenBatch, served_prompts

SIGNS = {"positive": "Â > 0", "negative": "Â < 0", "zero": "Â = 0"}
"""Sign of a token's advantage, which is that of its weight → words."""


def has_gradient(table: pd.DataFrame) -> bool:
    """Return whether every weight is known and one is not 0."""
    return bool(table["weight"].notna().all()) and bool((table["weight"] != 0).any())


def count_informative_prompts(table: pd.DataFrame) -> int:
    """Count the prompts that contribute: those with a weight in the policy's part of the loss, or all without weights.

    Where the policy's part has no weight, prompts with any weight count.
    """
    if not has_gradient(table):
        return table["group"].nunique()
    own = table["policy_weight"] if "policy_weight" in table and table["policy_weight"].any() else table["weight"]
    return table.loc[own != 0, "group"].nunique()


def supply_of(table: pd.DataFrame, batch: TokenBatch, minutes: float | None = None) -> Supply:
    """Count the prompts behind a table, and those of the whole batch. minutes: `Supply.minutes`."""
    informative, responses = count_informative_prompts(table), table["response"].nunique()
    prompts = len(batch.group_ids[batch.response_mask.any(1)].unique())
    served = max(informative, len(served_prompts(batch)))
    return Supply(informative, table["group"].nunique(), responses, served, prompts, minutes)


def with_advantages(batch: TokenBatch, table: pd.DataFrame, loss: LossSettings) -> TokenBatch:
    """Add the table's advantages to a batch that has none, so that steps use the table's weights."""
    if batch.advantages is not None or (batch.rewards is None and not loss.is_whole):
        return batch
    advantages = torch.full(batch.input_ids.shape, float("nan"))
    advantages[batch.response_mask] = torch.tensor(table["advantage"].to_numpy(np.float32))
    return replace(batch, advantages=advantages)


def seeds_of(table: pd.DataFrame, batch: TokenBatch, num_intervals: int) -> Float[Tensor, "A B S"]:
    """Return −w_t / num_tokens for each interval's tokens, 0 elsewhere: the seeds of its gradient of the loss."""
    weights = torch.zeros(batch.input_ids.shape, dtype=torch.float64)
    intervals = torch.full(batch.input_ids.shape, -1)
    weights[batch.response_mask] = torch.tensor(table["weight"].to_numpy(np.float64)) / -batch.num_tokens
    intervals[batch.response_mask] = torch.tensor(table["interval"].to_numpy(np.int64))
    return weights * (intervals == torch.arange(num_intervals)[:, None, None])
