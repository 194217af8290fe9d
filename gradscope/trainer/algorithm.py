"""What a step trains on: the configured algorithm's advantages, and the passes of the configured method or control."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from gradscope.errors import InputError
from gradscope.objective import (
    LossSettings,
    Pass,
    Weighting,
    reinforce_pp_advantages,
    resolve_advantages,
    split_passes,
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
    weighting: Weighting | None = None
    """What weighs the tokens in each step in the place of Eq. 2's policy part; None: nothing."""


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
    """The passes of one batch that has advantages; the generator draws what a control permutes.

    Without old_logprobs, the batch is trained on in one step, which takes the policy's own.
    """
    method, settings, match = config.passes, config.loss, None
    if batch.old_logprobs is None:
        return Update(split_passes(batch, config.mini_batch_size, [("all", batch.response_mask)]), batch, settings)
    place = (batch.old_logprobs, batch.response_mask, config.mini_batch_size, generator)
    if method.control == "matched-norm":
        settings, match = replace(settings, reweight_alpha=None), settings
    elif method.control == "permuted-weights":
        batch = replace(batch, advantages=batch.advantages * method.permuted_factors(*place))
        settings = replace(settings, reweight_alpha=None)
    groups = method.drawn_groups(*place)
    passes = split_passes(batch, config.mini_batch_size, groups, schedule=config.lopti_schedule)
    return Update(passes, batch, settings, match, config.weighting)


def takes_one_step(config: TrainConfig) -> bool:
    """Whether a batch is trained on in one optimizer step that needs no π_old before it: the step finds its own.

    REINFORCE++ with a KL whitens over the batch's π_old; Lopti, masks, controls and weightings look at it first.
    """
    method, before = config.passes, config.algorithm == "reinforce++" and config.kl_coef > 0
    plain = not method.chooses and method.control is None and config.weighting is None
    return config.old_logprobs == "trainer" and config.num_responses <= config.mini_batch_size and plain and not before
