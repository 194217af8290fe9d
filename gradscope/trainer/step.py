"""Advantages, the optimizer-step plan (plain, Lopti, controls), and per-step metrics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from gradscope.errors import InputError
from gradscope.intervals import EDGES, assign_intervals
from gradscope.objective import (
    StepResult,
    TokenStatistics,
    Update,
    kl_k3,
    reinforce_pp_advantages,
    resolve_advantages,
    split_steps,
)
from gradscope.rollouts import TokenBatch
from gradscope.trainer.config import TrainConfig


def compute_advantages(batch: TokenBatch, config: TrainConfig) -> Float[Tensor, "B S"]:
    """Return the advantages of `config.algorithm`.

    GRPO: group-normalised rewards, KL in the loss. REINFORCE++ (Eq. 20, 21 of arXiv:2505.12929): batch-whitened
    return-to-go, KL in the reward.
    """
    if config.algorithm == "grpo":
        return resolve_advantages(replace(batch, advantages=None))
    if config.kl_coef > 0 and batch.ref_logprobs is None:
        raise InputError(f"kl_coef is {config.kl_coef}, but the batch has no ref_logprobs; give them, or kl_coef 0")
    # With kl_coef 0, neither is used.
    old = torch.zeros(batch.response_mask.shape) if batch.old_logprobs is None else batch.old_logprobs
    reference = old if batch.ref_logprobs is None else batch.ref_logprobs
    return reinforce_pp_advantages(batch.rewards, old, reference, batch.response_mask, kl_coef=config.kl_coef)


def takes_one_step(config: TrainConfig) -> bool:
    """Return whether a batch gets a single optimizer step, with nothing before it that needs π_old.

    REINFORCE++ with KL needs π_old for its advantages; Lopti, masks, controls and weightings choose or weight tokens
    by it.
    """
    rule, before = config.rule, config.algorithm == "reinforce++" and config.kl_coef > 0
    plain = not rule.chooses and rule.control is None and config.weighting is None
    return config.old_logprobs == "trainer" and config.num_responses <= config.mini_batch_size and plain and not before


def plan_update(batch: TokenBatch, config: TrainConfig, generator: torch.Generator) -> Update:
    """Plan the optimizer steps on a batch with advantages; the generator is for a control's permutation or split.

    A batch without old_logprobs gets one step on all tokens (see `takes_one_step`).
    """
    rule, settings, match = config.rule, config.loss, None
    if batch.old_logprobs is None:
        everything = [("all", batch.response_mask)]
        return Update(split_steps(batch, config.mini_batch_size, everything), batch, settings)
    place = (batch.old_logprobs, batch.response_mask, config.mini_batch_size, generator)
    if rule.control == "matched-norm":
        # Train plain, rescale to Reweight's norm.
        settings, match = replace(settings, reweight_alpha=None), settings
    elif rule.control == "permuted-weights":
        # The permuted factors are in the advantages, so Reweight is off.
        batch = replace(batch, advantages=batch.advantages * rule.permuted_factors(*place))
        settings = replace(settings, reweight_alpha=None)
    steps = split_steps(batch, config.mini_batch_size, rule.drawn_groups(*place), schedule=config.lopti_schedule)
    return Update(steps, batch, settings, match, config.weighting)


def token_metrics(batch: TokenBatch, statistics: TokenStatistics) -> dict[str, float]:
    """Summarize the response tokens before the update by means.

    Returns:
        entropy and kl in nats; token_share_0 …, shares by interval of π_old; mismatch_mean and mismatch_max of
        |log π of the sampler − log π of the trainer|.
    """
    keep = batch.response_mask
    prob = batch.old_logprobs[keep].double().exp().clamp(max=1.0).numpy()
    intervals = torch.from_numpy(assign_intervals(prob))
    shares = torch.bincount(intervals, minlength=len(EDGES) - 1) / len(intervals)
    drift = (batch.sampler_logprobs - statistics.logprob)[keep].abs()
    kl = math.nan
    if batch.ref_logprobs is not None:
        kl = float(kl_k3(statistics.logprob[keep], batch.ref_logprobs[keep]).mean())
    return {
        "entropy": float(statistics.entropy[keep].mean()),
        "kl": kl,
        **{f"token_share_{i}": float(share) for i, share in enumerate(shares)},
        "mismatch_mean": float(drift.mean()),
        "mismatch_max": float(drift.max()),
    }


def update_metrics(results: Sequence[StepResult]) -> dict[str, Any]:
    """Summarize the optimizer steps: lists have an entry per step; clip fractions are over all tokens of all steps."""
    tokens = max(1, sum(result.num_tokens for result in results))
    return {
        "passes": [result.name for result in results],
        "loss": [result.loss for result in results],
        "grad_norm": [result.grad_norm for result in results],
        "grad_norm_clipped": [result.grad_norm_clipped for result in results],
        "clip_fraction_low": sum(result.clipped_low for result in results) / tokens,
        "clip_fraction_high": sum(result.clipped_high for result in results) / tokens,
        "clip_fraction_dual": sum(result.clipped_dual for result in results) / tokens,
        "optimizer_steps": sum(result.outcome == "taken" for result in results),
        "empty_passes": sum(result.outcome == "empty" for result in results),
        "nonfinite_steps": sum(result.outcome == "nonfinite" for result in results),
    }
