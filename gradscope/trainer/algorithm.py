"""What a step trains on: the configured algorithm's advantages, and the passes of the configured method or control."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gradscope.errors import InputError
from gradscope.objective import (
    Choose,
    LossSettings,
    Pass,
    lopti_split,
    random_split,
    reinforce_pp_advantages,
    resolve_advantages,
    reweight,
    split_passes,
    whole_passes,
)
from gradscope.rollouts import TokenBatch
from gradscope.trainer.config import TrainConfig


@dataclass(frozen=True)
class Update:
    """All optimizer steps on one batch of responses."""

    passes: list[Pass]
    batch: TokenBatch
    """The whole batch, with the advantages that are trained on."""
    settings: LossSettings
    match: LossSettings | None = None
    """Settings to whose gradient norm each step's gradient is rescaled; None: it is not."""


def compute_advantages(batch: TokenBatch, config: TrainConfig) -> Float[Tensor, "B S"]:
    """GRPO's advantages from the batch's rewards within groups, or REINFORCE++'s from whole returns (Eq. 20, 21)."""
    if config.algorithm == "grpo":
        return resolve_advantages(replace(batch, advantages=None))
    if config.kl_coef > 0 and batch.ref_logprobs is None:
        raise InputError(f"kl_coef is {config.kl_coef} and the batch has no ref_logprobs; give them, or kl_coef 0")
    reference = batch.old_logprobs if batch.ref_logprobs is None else batch.ref_logprobs  # not used: kl_coef is 0
    return reinforce_pp_advantages(
        batch.rewards, batch.old_logprobs, reference, batch.response_mask, kl_coef=config.kl_coef
    )


def plan_update(batch: TokenBatch, config: TrainConfig, generator: torch.Generator) -> Update:
    """The passes of one batch that has advantages and old_logprobs; the generator draws what a control permutes."""
    settings, match = config.loss, None
    if config.control == "matched-norm":
        settings, match = replace(settings, reweight_alpha=None), settings
    elif config.control == "permuted-weights":
        batch = replace(batch, advantages=_permuted_reweight(batch, config, generator))
        settings = replace(settings, reweight_alpha=None)
    if config.lopti_eta is None:
        passes = whole_passes(batch, config.mini_batch_size)
    else:
        passes = _lopti_passes(batch, config, generator)
    return Update([_without_masked(part, config.mask_probs) for part in passes], batch, settings, match)


def scores_in_first_pass(config: TrainConfig) -> bool:
    """Whether the first mini-batch's π_old can be what its own first pass finds, since nothing before it needs π_old.

    REINFORCE++ with a KL whitens over the batch's π_old; the controls deal out what they find in all of it.
    """
    before = config.algorithm == "reinforce++" and config.kl_coef > 0
    return config.old_logprobs == "trainer" and config.control is None and not before


def first_choice(config: TrainConfig) -> Choose | None:
    """Which tokens of the first mini-batch `plan_update`'s first pass takes, by their π_old; None: all."""
    if config.lopti_eta is None and config.mask_probs is None:
        return None

    def choose(old_logprobs: Float[Tensor, "b n"], response_mask: Bool[Tensor, "b n"]) -> Bool[Tensor, "b n"]:
        chosen = response_mask
        if config.lopti_eta is not None:
            low, high = lopti_split(old_logprobs, response_mask, eta=config.lopti_eta)
            chosen = low if config.lopti_order == "low-first" else high
        return chosen & ~_masked(old_logprobs, config.mask_probs)

    return choose


def _lopti_passes(batch: TokenBatch, config: TrainConfig, generator: torch.Generator) -> list[Pass]:
    low, high = lopti_split(batch.old_logprobs, batch.response_mask, eta=config.lopti_eta)
    names = ("low", "high")
    if config.control == "random-split":
        low, high = random_split(low, batch.response_mask, config.mini_batch_size, generator)
        names = ("random-low", "random-high")
    groups = list(zip(names, (low, high), strict=True))
    if config.lopti_order == "high-first":
        groups.reverse()
    return split_passes(batch, config.mini_batch_size, groups, schedule=config.lopti_schedule)


def _permuted_reweight(batch: TokenBatch, config: TrainConfig, generator: torch.Generator) -> Float[Tensor, "B S"]:
    """Advantages times Reweight's factors α·π_old + 1 − α (Eq. 4), dealt out at random within each mini-batch."""
    factors = reweight(torch.ones_like(batch.old_logprobs), batch.old_logprobs, alpha=config.reweight_alpha)
    dealt = torch.ones_like(factors)
    for rows in torch.arange(len(batch)).split(config.mini_batch_size):
        mask = batch.response_mask[rows]
        own = factors[rows][mask]
        dealt[rows] = dealt[rows].masked_scatter(mask, own[torch.randperm(len(own), generator=generator)])
    return batch.advantages * dealt


def _without_masked(part: Pass, mask_probs: tuple[float, float] | None) -> Pass:
    """The pass without tokens whose π_old lies in the masked range; the denominator stays."""
    keep = part.batch.response_mask & ~_masked(part.batch.old_logprobs, mask_probs)
    return replace(part, batch=replace(part.batch, response_mask=keep))


def _masked(old_logprobs: Float[Tensor, "b n"], mask_probs: tuple[float, float] | None) -> Bool[Tensor, "b n"]:
    """Where π_old lies in [low, high), or in [low, 1] for a high of 1; nowhere for None."""
    if mask_probs is None:
        return torch.zeros_like(old_logprobs, dtype=torch.bool)
    low, high = mask_probs
    probs = old_logprobs.exp()
    return (probs >= low) & ((probs < high) | (high == 1))
