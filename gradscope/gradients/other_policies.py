"""log π of a batch's tokens under another policy: a preference loss's reference, a distillation's teacher."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch

from gradscope.errors import InputError
from gradscope.gradients.frozen import measuring
from gradscope.objective import batch_statistics, fitting_size
from gradscope.policy import Policy
from gradscope.rollouts import TokenBatch
from gradscope.runs import ALONE, Processes

AT_ONCE = 8
"""Responses that are scored together."""


def with_logprobs_of(
    other: Policy,
    batch: TokenBatch,
    column: Literal["ref_logprobs", "teacher_logprobs"] = "ref_logprobs",
    *,
    policy: Policy | None = None,
    processes: Processes = ALONE,
) -> TokenBatch:
    """Return the batch with log π of every kept token under another policy in this column, at its temperature.

    policy: whose tokens these are, if it is to be checked that both have one vocabulary. Raises InputError if they do
    not, or if the other's context is too short.
    """
    if policy is not None:
        words = [own.tokenizer.get_vocab() for own in (policy, other) if own.tokenizer is not None]
        if policy.vocab_size != other.vocab_size or words[1:] not in ([], words[:1]):
            raise InputError(
                f"{other.path or 'the other policy'} has another vocabulary than the policy, so its log π are of other "
                "tokens; give a checkpoint with the policy's tokenizer"
            )
    if why := other.why_too_long(length := int(batch.attention_mask.sum(1).max())):
        raise InputError(f"a response and its prompt are {length} tokens long, {why} ({other.path}); leave them out")
    size = fitting_size(other.model, batch, AT_ONCE, copies=2)
    with measuring(other.model, batch.width):
        known = {"micro_batch_size": size, "device": other.device, "processes": processes}
        logprobs = batch_statistics(other.model, batch, **known).logprob.float()
    if not logprobs[batch.response_mask].isfinite().all():
        raise InputError(
            f"{other.path or 'the other policy'} gives a token probability 0 or NaN; does it read these?"
        )
    return replace(batch, **{column: logprobs.masked_fill(~batch.response_mask, torch.nan)})
