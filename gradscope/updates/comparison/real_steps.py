"""What real AdamW steps do where a weighting takes several: directions, and how far they turn the displacement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gradscope.objective import LossSettings, split_passes
from gradscope.policy import PART, Policy, square_norm
from gradscope.rollouts import TokenBatch
from gradscope.updates.directions import log_odds_change
from gradscope.updates.movement import Movement, apply_update
from gradscope.updates.variants import Variant

Masks = Sequence[tuple[str, Bool[np.ndarray, " K"]]]
"""(name, tokens) of each optimizer step, in their order."""


def take_steps(
    policy: Policy, batch: TokenBatch, masks: Mapping[str, Masks], *, loss: LossSettings, **keywords: Any
) -> tuple[Float[np.ndarray, "M K"], Float[np.ndarray, " M"]]:
    """Δ of each token's log odds by plain's step, then by each method's real steps; and the cosine with plain's Δθ.

    masks: by method. keywords: those of `apply_update`. All steps are rewound. Memory: two displacements, beside what
    a step takes.
    """
    plain = apply_update(policy, batch, loss=loss, displacement=True, **keywords)
    changes, cosines = [_log_odds(plain)], [1.0]
    for name, groups in masks.items():
        spread = [(step, _spread(plain.batch, mask)) for step, mask in groups]
        variant = Variant(name, split_passes(plain.batch, len(batch), spread), loss)
        moved = apply_update(policy, batch, variant, before=plain.before, displacement=True, **keywords)
        changes.append(_log_odds(moved))
        cosines.append(_cosine(moved.displacement, plain.displacement))
    return np.stack(changes), np.array(cosines)


def _spread(batch: TokenBatch, mask: Bool[np.ndarray, " K"]) -> Bool[Tensor, "B S"]:
    keep = batch.response_mask
    return torch.zeros_like(keep).masked_scatter(keep, torch.from_numpy(mask))


def _log_odds(moved: Movement) -> Float[np.ndarray, " K"]:
    return log_odds_change(moved.before, moved.after)[moved.batch.response_mask].double().numpy()


def _cosine(one: Float[Tensor, " P"], other: Float[Tensor, " P"]) -> float:
    pairs = zip(one.split(PART), other.split(PART), strict=True)
    norms = (square_norm(one) * square_norm(other)) ** 0.5
    return sum((a.double() @ b.double()).item() for a, b in pairs) / norms if norms else float("nan")
