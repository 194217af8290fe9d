"""Take real steps under each weighting: directions of tokens, and gains on unseen prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gradscope.gradients import FORWARD_MODE, TokenJacobian, Vectors
from gradscope.objective import Update, Weighting, split_steps
from gradscope.policy import PART, flat_slices, square_norm
from gradscope.rollouts import TokenBatch
from gradscope.runs import track
from gradscope.updates.directions import log_odds_change
from gradscope.updates.movement import Movement
from gradscope.updates.optimizer_step import OptimizerStep, update_cost

Masks = Sequence[tuple[str, Bool[np.ndarray, " K"]]]
"""(name, tokens) of each optimizer step, in order."""


def take_steps(
    steps: OptimizerStep, weightings: Mapping[str, Weighting | Masks]
) -> tuple[Float[np.ndarray, "M K"], Float[np.ndarray, " M"]]:
    """Return Δ log odds of tokens by plain's step, then by each weighting's real steps, and cosines with plain's Δθ.

    weightings: a Weighting of a single step, or the tokens of each of several plain steps. Memory: two displacements,
    in addition to a step's own.
    """
    plain, progress = steps.take(displacement=True), steps.jacobian.resources.progress
    changes, cosines = [_log_odds(plain)], [1.0]
    for name, own in track(weightings.items(), "taking real steps", progress, unit="weightings"):
        if not isinstance(own, Weighting):
            masks = [(step, _spread(plain.batch, mask)) for step, mask in own]
            own = Update(split_steps(plain.batch, len(plain.batch), masks), plain.batch, plain.settings, name=name)
        moved = steps.take(own, displacement=True)
        changes.append(_log_odds(moved))
        cosines.append(_cosine(moved.displacement, plain.displacement))
    return np.stack(changes), np.array(cosines)


def gains_cost(rows: int) -> float:
    """Return an upper bound on the forward passes of `gains_on_unseen_prompts` for so many rows of weights."""
    return rows * (update_cost() + FORWARD_MODE) + 3 * update_cost(2)


def gains_on_unseen_prompts(
    steps: OptimizerStep, weightings: Sequence[Weighting], *, seed: int
) -> Float[np.ndarray, "M n"] | None:
    """Return the first-order gain in each prompt's expected reward by each weighting's own steps on other prompts.

    gain = Cov_i(R_i, Σ_t ⟨∇ log π(o_it), Δθ⟩) over the prompt's responses, which is unbiased for ⟨∇ E[R], Δθ⟩ if the
    policy itself sampled the responses.

    Prompts with several responses are dealt into two halves. Each prompt's Δθ comes from the half without it;
    thresholds and draws also use that half's tokens only. weightings: plain first. None without rewards, without tokens
    or with fewer than four such prompts.
    """
    batch, progress = steps.jacobian.batch, steps.jacobian.resources.progress
    prompts, counts = batch.group_ids[batch.response_mask.any(1)].unique(return_counts=True)
    prompts = prompts[counts > 1]
    if batch.rewards is None or batch.rewards.isnan().any() or len(prompts) < 4:
        return None
    halves = batch.deal(prompts, 2, torch.Generator().manual_seed(seed))
    if not all(half.num_tokens for half in halves):
        return None
    found = []
    for own, other in (halves, halves[::-1]):
        on_half, J = steps.on(own), steps.on(other).jacobian
        plain = on_half.take(displacement=True)
        gains = [_gains(J, plain.displacement)]
        for weighting in track(weightings[1:], "gains on other prompts", progress, unit="weightings"):
            moved = on_half.take(_as_trained(weighting, plain), displacement=True)
            gains.append(_gains(J, moved.displacement))
        found.append(np.stack(gains))
    return np.concatenate(found, axis=1)


def _as_trained(weighting: Weighting, plain: Movement) -> Weighting | Update:
    """Return the update on the batch of plain's step; two-step weightings split its tokens as the trainer does."""
    if weighting.rule.lopti_eta is None:
        return weighting
    batch, drawn = plain.batch, torch.Generator().manual_seed(0)
    masks = weighting.rule.drawn_groups(batch.old_logprobs, batch.response_mask, len(batch), drawn)
    return Update(split_steps(batch, len(batch), masks), batch, plain.settings, name=str(weighting))


def _gains(J: TokenJacobian, direction: Float[Tensor, " P"]) -> Float[np.ndarray, " n"]:
    batch, changes = J.batch, J.jvp(Vectors(direction[None], flat_slices(J.model))).logprob
    pairs = torch.stack([batch.rewards.double(), J.spread(changes)[0].double().sum(1)])
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
