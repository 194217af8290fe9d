"""Settings of Eq. 1's loss, and defaults for unknown columns of a batch (arXiv:2505.12929).

Loss and weights take the same arguments, so that the weights are those of the training loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from math import isfinite
from typing import Annotated, Any

import numpy as np
import torch
import tyro
from jaxtyping import Bool, Float
from torch import Tensor

from gradscope.errors import InputError
from gradscope.objective.equations import (
    Estimator,
    TokenWeights,
    check_clipping,
    check_estimator,
    grpo_advantages,
    policy_loss,
    scale_rewards,
    token_weight_parts,
)
from gradscope.objective.step_rule import StepRule
from gradscope.objective.weighting import Weighting
from gradscope.objective.weightings import make_weighting
from gradscope.rollouts import Note, TokenBatch

Number = int | float


@dataclass(frozen=True)
class LossSettings:
    """The loss whose gradient is measured (Eq. 1, arXiv:2505.12929); the defaults are the paper's GRPO."""

    clip_ratio_low: Number = 0.2
    clip_ratio_high: Number = 0.24
    clip_ratio_c: Number | None = 10.0
    """Dual clip of negative advantages; None: off."""
    kl_coef: Number = 0.001
    """β of the KL penalty. Tokens without ref_logprobs get none."""
    reweight_alpha: Number | None = None
    """α of Advantage Reweighting (Eq. 4); None: off."""
    kl_corrected: bool = False
    """Multiply the penalty by π_θ/π_old, as TRL does unless told otherwise (use_bias_correction_kl)."""
    kl_estimator: Estimator = "k3"
    """The penalty at a token: k1 = log(π/π_ref), k2 = k1²/2, k3 = π_ref/π − 1 + k1 (the paper's, TRL's)."""
    weighting: Annotated[str | None, tyro.conf.arg(aliases=("--update",))] = None
    """The token weighting that makes the update, NAME[:key=value,…]: sft, dft, opd:estimator=k1, dpo:beta=.1, …; its
    w_t replaces the policy part. None: plain GRPO."""

    @cached_property
    def weighed(self) -> Weighting | None:
        """The weighting, if any."""
        return None if self.weighting is None else make_weighting(self.weighting)

    @property
    def is_whole(self) -> bool:
        """Whether the loss has a weighting that needs neither advantages nor a KL part."""
        return self.weighting is not None and self.weighed.is_whole

    @property
    def is_sampled(self) -> bool:
        """Whether the loss is of tokens that the policy sampled, not of given text."""
        return self.weighting is None or self.weighed.IS_SAMPLED

    @property
    def has_sides(self) -> bool:
        """Whether the loss is of chosen and rejected responses."""
        return self.weighting is not None and self.weighed.DENOMINATOR != "tokens"

    def check(self) -> None:
        """Raise InputError for settings that define no loss."""
        check_estimator(self.kl_estimator)
        for name, value in asdict(self).items():
            if name in ("kl_estimator", "weighting") or value is None:
                continue
            if not (isfinite(value) and value >= 0):
                raise InputError(f"{name} is {value}; give a finite number, 0 or more")
        if self.weighting is not None:
            if self.reweight_alpha is not None:
                raise InputError(f"the weighting {self.weighting} and reweight_alpha both weigh tokens; give one")
            refuse_steps(self.weighed)
        check_clipping(self.clip_ratio_low, self.clip_ratio_high, self.clip_ratio_c)
        StepRule(self.reweight_alpha)  # refuses α > 1

    @classmethod
    def from_log(cls, told: Mapping[str, Any]) -> LossSettings:
        """Return the settings recorded in a log (`Dump.loss`), with defaults for the others.

        >>> LossSettings.from_log({"clip_ratio_high": 0.2, "kl_coef": 0.0}).clip_ratio_high
        0.2
        """
        known = {field.name for field in fields(cls)}
        if strange := sorted(told.keys() - known):
            raise InputError(f"the log's loss has a setting {strange[0]!r:.60}; known are {', '.join(sorted(known))}")
        for name, value in told.items():
            kind = {"kl_corrected": bool, "kl_estimator": str, "weighting": str | None}.get(name, int | float | None)
            if not isinstance(value, kind):
                raise InputError(f"the log's loss has {name} {value!r:.60}; write what it takes")
        (loss := cls(**told)).check()
        return loss


PAPER = LossSettings()
ABOUT_ADVANTAGES = ("zero-advantages", "impossible-advantages", "groups-of-one", "mixed-groups")
"""Kinds of notes on advantages and the groups that they come from."""
REMEDIES = {
    "ref_logprobs": "give the reference's checkpoint (--reference PATH, in Python gradients.with_logprobs_of), write "
    "them into the rows, or take a loss without a reference (--weighting simpo)",
    "teacher_logprobs": "give the teacher's checkpoint (--teacher PATH, in Python gradients.with_logprobs_of), or "
    "write them into the rows",
}
"""What to do without the log-probabilities of another policy, by field."""
ABOUT_SAMPLING = ("on-policy", "temperature")
"""Kinds of notes on what was assumed of the policy that sampled the tokens."""


def settle_loss(batch: TokenBatch, settings: LossSettings) -> TokenBatch:
    """Return the batch as the loss sees it: one of its own has no advantages, and divides by what it is a mean over.

    For those losses `loss_scales`, unless logged, becomes N over their denominator, and notes about advantages go, as
    do rewards that are all equal. A note of kind doubtful-loss says what the loss cannot do. Raises InputError if the
    batch lacks what the loss needs.
    """
    if (weighting := settings.weighed) is None:
        return batch
    needed = {"tokens": {}, "responses": {"chosen": "chosen"}, "pairs": {"pair_ids": "pair", "chosen": "chosen"}}
    for name, column in needed[weighting.DENOMINATOR].items():
        if getattr(batch, name) is None:
            raise InputError(
                f"{weighting} needs the column `{column}`, and the rollouts have none; add it to every row"
            )
    for name in weighting.OTHERS:
        if getattr(batch, name) is None:
            raise InputError(f"{weighting} needs `{name}`, and the rollouts have none; {REMEDIES[name]}")
    told = (Note(f"{weighting}: {words}", "doubtful-loss") for words in weighting.doubts)
    batch = replace(batch, notes=(*batch.notes, *(note for note in told if note not in batch.notes)))
    if not weighting.is_whole:
        return batch
    for kind in ABOUT_ADVANTAGES if weighting.IS_SAMPLED else (*ABOUT_ADVANTAGES, *ABOUT_SAMPLING):
        batch = batch.without_notes(kind)
    rewards = batch.rewards
    unequal = rewards is not None and bool((rewards != rewards[0]).any())
    batch = replace(batch, advantages=None, rewards=rewards if unequal else None)
    if weighting.DENOMINATOR == "tokens" or batch.loss_scales is not None:
        return batch
    kept = batch.response_mask.any(1)
    examples = int(kept.sum()) if weighting.DENOMINATOR == "responses" else len(batch.pair_ids[kept].unique())
    return replace(batch, loss_scales=torch.full((len(batch),), batch.num_tokens / max(1, examples)))


def resolve_advantages(batch: TokenBatch, *, eps: Number = 1e-6) -> Float[Tensor, "B S"]:
    """Return the batch's advantages [B, S] or, if it has none, GRPO's from the rewards within each group.

    eps: added to the group's standard deviation, see `grpo_advantages`; 1e-6 in the paper's code, 1e-4 in TRL.
    Mean and standard deviation are those of the rewards in the batch, or its `group_reward_means` and
    `group_reward_stds`. Given advantages are returned as they are, NaN included. Raises InputError with neither.
    """
    if batch.advantages is not None:
        return batch.advantages
    if batch.rewards is None:
        raise InputError("weights need advantages or rewards, and the batch has neither; add one to the rollouts")
    if batch.group_reward_means is None or batch.group_reward_stds is None:
        return batch.spread_over_tokens(grpo_advantages(batch.rewards, batch.group_ids, eps=eps))
    known = batch.group_reward_means, batch.group_reward_stds
    return batch.spread_over_tokens(scale_rewards(batch.rewards, *known, eps=eps))


def settle_advantages(
    batch: TokenBatch,
    logprobs: Float[Tensor, "B S"],
    settings: LossSettings,
    *,
    entropy: Float[Tensor, "B S"] | None = None,
) -> Float[Tensor, "B S"]:
    """Return `resolve_advantages`; for a loss of its own, which has none, its weights before the loss's scale."""
    if not settings.is_whole:
        return resolve_advantages(batch)
    plain = replace(batch, loss_scales=None)
    return batch_weights(logprobs, plain, settings, num_tokens=batch.num_tokens, entropy=entropy).policy


def fill_unknown(theirs: Float[Tensor, "B S"] | None, logprobs: Float[Tensor, "B S"]) -> Float[Tensor, "B S"]:
    """Replace unknown log-probabilities (None or NaN) by the policy's own, detached.

    >>> fill_unknown(torch.tensor([[-1.0, torch.nan]]), torch.tensor([[-2.0, -3.0]]))
    tensor([[-1., -3.]])
    """
    own = logprobs.detach()
    return own if theirs is None else torch.where(theirs.isnan(), own, theirs.to(own.dtype))


def batch_loss(
    logprobs: Float[Tensor, "B S"],
    batch: TokenBatch,
    settings: LossSettings,
    *,
    num_tokens: Number,
    refuse_nan: bool = True,
) -> Float[Tensor, ""]:
    """Compute `policy_loss` of the batch, a scalar to minimise (Eq. 1; Eq. 4 with reweight_alpha).

    logprobs: log π of each token in nats, at the batch's temperature; gradients flow only into these.
    num_tokens: the count of response tokens of the whole mini-batch, of which `batch` may be a part.
    Unknown old_logprobs mean ratio 1, unknown ref_logprobs no KL. Advantages come from `resolve_advantages`; resolve
    them before cutting a batch, since they compare the responses of a whole group. With a weighting, the loss is
    −Σ w_t·log π_t/N with its weights held fixed, and the KL part. Raises InputError if they are
    unknown, or NaN on a kept token unless refuse_nan is False.
    """
    if settings.weighting is not None:
        weights = batch_weights(logprobs.detach(), batch, settings, num_tokens=num_tokens).total
        return -torch.where(batch.response_mask, weights * logprobs, 0.0).sum() / num_tokens
    return policy_loss(**_arguments(logprobs, batch, settings, num_tokens), refuse_nan=refuse_nan)


def batch_weights(
    logprobs: Float[Tensor, "B S"],
    batch: TokenBatch,
    settings: LossSettings,
    *,
    num_tokens: Number,
    entropy: Float[Tensor, "B S"] | None = None,
    refuse_nan: bool = True,
) -> TokenWeights:
    """Compute Eq. 2's w_t of `batch_loss`: −num_tokens · ∂batch_loss/∂logprob of every token, by policy and KL part.

    With `settings.weighting` the policy part is that weighting's, whose thresholds and pairs are over the given batch;
    entropy: for weightings that need it. Other arguments and errors are those of `batch_loss`.
    """
    if (weighting := settings.weighed) is None:
        return token_weight_parts(**_arguments(logprobs, batch, settings, num_tokens), refuse_nan=refuse_nan)
    known = {"logprob": logprobs, "entropy": entropy, "old_logprob": batch.old_logprobs}
    known |= {"ref_logprob": batch.ref_logprobs, "teacher_logprob": batch.teacher_logprobs}
    known |= {"sampler_logprob": batch.sampler_logprobs}
    of_responses = {"pair": batch.pair_ids, "chosen": batch.chosen, "z0": batch.z0s, "loss_scale": batch.loss_scales}
    known |= {name: batch.spread_over_tokens(own) for name, own in of_responses.items() if own is not None}
    if weighting.is_whole:
        nothing = torch.zeros_like(logprobs)
        plain = TokenWeights(nothing, nothing, torch.zeros_like(batch.response_mask))
    else:
        plain = token_weight_parts(**_arguments(logprobs, batch, settings, num_tokens), refuse_nan=refuse_nan)
        known["advantage"] = resolve_advantages(batch)
    policy = _weigh(weighting, known | {"policy_weight": plain.policy}, batch.response_mask)
    return TokenWeights(policy, plain.kl, plain.clipped & (policy == 0))


def _weigh(weighting: Weighting, known: Mapping[str, Tensor | None], mask: Bool[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """Compute w_t under a weighting of one optimizer step, detached; 0 on dropped tokens. known: columns [B, T]."""
    columns = {name: v.detach()[mask].double().cpu().numpy() for name, v in known.items() if v is not None}
    columns.setdefault("old_logprob", np.full_like(columns["logprob"], np.nan))
    columns |= dict(zip(("response", "place"), mask.nonzero().T.cpu().numpy(), strict=True))
    refuse_steps(weighting)
    weights, *others = weighting.weights(columns).values()
    if others:
        raise InputError(f"{weighting} takes {1 + len(others)} optimizer steps; give a weighting that takes one")
    return torch.zeros_like(known["logprob"]).masked_scatter(mask, torch.from_numpy(weights).to(known["logprob"]))


def refuse_steps(weighting: Weighting) -> None:
    """Raise InputError for a weighting of two optimizer steps, or one whose scale only the trainer knows."""
    if weighting.rule.control == "matched-norm":
        raise InputError(f"{weighting} needs the norms of two gradients, which only the trainer computes; leave it out")
    if weighting.rule.lopti_eta is not None:
        raise InputError(f"{weighting} takes two optimizer steps; give a weighting that takes one")


def weigh_step(
    weighting: Weighting,
    logprobs: Float[Tensor, "B T"],
    old_logprobs: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    response_mask: Bool[Tensor, "B T"],
    settings: LossSettings,
    *,
    entropy: Float[Tensor, "B T"] | None = None,
    sampler_logprobs: Float[Tensor, "B T"] | None = None,
) -> Float[Tensor, "B T"]:
    """Compute w_t under a weighting that takes one optimizer step, detached; 0 on dropped tokens.

    settings: of the plain loss, whose policy part many weightings start from. Thresholds are over the given tokens.
    Raises InputError for a weighting of several steps, or if a column that it needs is unknown.
    """
    clips = {name: getattr(settings, name) for name in ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c")}
    plain = advantages.masked_fill(~response_mask, 0.0)  # of a loss of its own: its weights
    if not settings.is_whole:
        given = (logprobs.detach(), old_logprobs, advantages, response_mask)
        plain = token_weight_parts(*given, **clips, num_tokens=1).policy
    known = {"logprob": logprobs, "old_logprob": old_logprobs, "advantage": advantages, "policy_weight": plain}
    return _weigh(weighting, known | {"entropy": entropy, "sampler_logprob": sampler_logprobs}, response_mask)


def check_weighting(weighting: Weighting, *, entropy: bool = True, sampler_logprobs: bool) -> None:
    """Raise InputError if the weighting takes several steps or needs a column the batch lacks."""
    one = torch.full((1, 1), -0.5)
    known = {name: one for name, has in (("entropy", entropy), ("sampler_logprobs", sampler_logprobs)) if has}
    weigh_step(weighting, one, one, one, torch.ones(1, 1, dtype=torch.bool), PAPER, **known)


def _arguments(logprobs: Tensor, batch: TokenBatch, settings: LossSettings, num_tokens: Number) -> dict[str, Any]:
    """Return the arguments common to policy_loss and token_weight_parts."""
    old, ref = fill_unknown(batch.old_logprobs, logprobs), batch.ref_logprobs
    return {
        "logprobs": logprobs,
        "old_logprobs": old,
        "advantages": StepRule(settings.reweight_alpha).advantages(resolve_advantages(batch), old),
        "response_mask": batch.response_mask,
        "clip_ratio_low": settings.clip_ratio_low,
        "clip_ratio_high": settings.clip_ratio_high,
        "clip_ratio_c": settings.clip_ratio_c,
        "ref_logprobs": fill_unknown(ref, logprobs),
        "has_reference": None if ref is None else ~ref.isnan(),
        "kl_coef": 0.0 if ref is None else settings.kl_coef,
        "kl_corrected": settings.kl_corrected,
        "kl_estimator": settings.kl_estimator,
        "num_tokens": num_tokens,
        "loss_scales": batch.loss_scales,
    }
