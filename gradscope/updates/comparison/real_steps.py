"""What real AdamW steps do: directions where a weighting takes several, and what each gains on unseen prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gradscope.gradients import predict_changes
from gradscope.objective import LossSettings, Weighting, split_passes
from gradscope.policy import PART, Policy, square_norm
from gradscope.rollouts import TokenBatch
from gradscope.runs import Progress, track
from gradscope.updates.directions import log_odds_change
from gradscope.updates.movement import Movement, apply_update
from gradscope.updates.variants import Variant, weighting_variant

Masks = Sequence[tuple[str, Bool[np.ndarray, " K"]]]
"""(name, tokens) of each optimizer step, in their order."""


def take_steps(
    policy: Policy,
    batch: TokenBatch,
    weightings: Mapping[str, Weighting | Masks],
    *,
    loss: LossSettings,
    progress: bool | Progress = False,
    **keywords: Any,
) -> tuple[Float[np.ndarray, "M K"], Float[np.ndarray, " M"]]:
    """Δ of each token's log odds by plain's step, then by each weighting's real steps; and the cosine with plain's Δθ.

    weightings: one of a single step, or the tokens of each of several plain ones. keywords: those of `apply_update`.
    All steps are rewound. Memory: two displacements, beside what a step takes.
    """
    plain = apply_update(policy, batch, loss=loss, displacement=True, **keywords)
    changes, cosines = [_log_odds(plain)], [1.0]
    for name, own in track(weightings.items(), "taking real steps", progress, unit="weightings"):
        if isinstance(own, Weighting):
            variant = weighting_variant(own, plain.batch, loss=loss)
        else:
            spread = [(step, _spread(plain.batch, mask)) for step, mask in own]
            variant = Variant(name, split_passes(plain.batch, len(batch), spread), loss)
        moved = apply_update(policy, batch, variant, before=plain.before, displacement=True, **keywords)
        changes.append(_log_odds(moved))
        cosines.append(_cosine(moved.displacement, plain.displacement))
    return np.stack(changes), np.array(cosines)


def gains_on_unseen_prompts(
    policy: Policy,
    batch: TokenBatch,
    weightings: Sequence[Weighting],
    *,
    loss: LossSettings,
    seed: int,
    micro_batch_size: int,
    progress: bool | Progress = False,
    **keywords: Any,
) -> Float[np.ndarray, "M n"] | None:
    """To first order, the gain in each prompt's expected reward by every weighting's own steps on other prompts.

    gain = Cov_i(R_i, Σ_t ⟨∇ log π(o_it), Δθ⟩) over the prompt's responses, which is unbiased for ⟨∇ E[R], Δθ⟩
    where the policy itself sampled the responses.

    Prompts of several responses are dealt into two halves; Δθ is of the half that a prompt is not in, whose tokens
    alone decide thresholds and draws. weightings: plain first. keywords: those of `apply_update`. None without rewards,
    without tokens or with fewer than four such prompts.
    """
    prompts, counts = batch.group_ids.unique(return_counts=True)
    prompts = prompts[counts > 1]
    if batch.rewards is None or batch.rewards.isnan().any() or len(prompts) < 4:
        return None
    halves = batch.deal(prompts, 2, torch.Generator().manual_seed(seed))
    if not all(half.num_tokens for half in halves):
        return None
    keywords |= {"loss": loss, "displacement": True}
    found = []
    for own, other in (halves, halves[::-1]):
        moved = apply_update(policy, own, **keywords)
        resolved, before = moved.batch, moved.before
        gains = [_gains(policy, other, moved.displacement, micro_batch_size)]
        for weighting in track(weightings[1:], "gains on other prompts", progress, unit="weightings"):
            moved = apply_update(policy, own, _trained(weighting, resolved, loss), before=before, **keywords)
            gains.append(_gains(policy, other, moved.displacement, micro_batch_size))
        found.append(np.stack(gains))
    return np.concatenate(found, axis=1)


def _trained(weighting: Weighting, batch: TokenBatch, loss: LossSettings) -> Variant:
    """As the trainer steps under it."""
    if weighting.passes.lopti_eta is None:
        return weighting_variant(weighting, batch, loss=loss)
    drawn = torch.Generator().manual_seed(0)
    groups = weighting.passes.drawn_groups(batch.old_logprobs, batch.response_mask, len(batch), drawn)
    return Variant(str(weighting), split_passes(batch, len(batch), groups), loss)


def _gains(
    policy: Policy, batch: TokenBatch, direction: Float[Tensor, " P"], micro_batch_size: int
) -> Float[np.ndarray, " n"]:
    changes, _ = predict_changes(policy.model, batch, direction[None], micro_batch_size=micro_batch_size)
    pairs = torch.stack([batch.rewards.double(), changes[0].double().sum(1)])
    prompts = batch.group_ids.unique()
    return np.array([torch.cov(pairs[:, batch.group_ids == prompt])[0, 1].item() for prompt in prompts])


def _spread(batch: TokenBatch, mask: Bool[np.ndarray, " K"]) -> Bool[Tensor, "B S"]:
    keep = batch.response_mask
    return torch.zeros_like(keep).masked_scatter(keep, torch.from_numpy(mask))


def _log_odds(moved: Movement) -> Float[np.ndarray, " K"]:
    return log_odds_change(moved.before, moved.after)[moved.batch.response_mask].double().numpy()


def _cosine(one: Float[Tensor, " P"], other: Float[Tensor, " P"]) -> float:
    pairs = zip(one.split(PART), other.split(PART), strict=True)
    norms = (square_norm(one) * square_norm(other)) ** 0.5
    return sum((a.double() @ b.double()).item() for a, b in pairs) / norms if norms else float("nan")
