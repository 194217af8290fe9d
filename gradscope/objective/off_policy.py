"""Off-policyness: |log π − log π_old|, the ratio, and the tokens that the trust region clips."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from jaxtyping import Float

from gradscope.objective.loss import LossSettings
from gradscope.runs import digits

ROUNDING = 1e-3
"""Largest |Δ log π| of a token, in nats, explained by float32 rounding and summation order."""
CLIPS = ("clip_low", "clip_high", "clip_dual")


def off_policyness(columns: Mapping[str, np.ndarray], loss: LossSettings) -> dict[str, Float[np.ndarray, " k"]]:
    """Measure off-policyness of the k tokens with a known log π_old, in float64.

    logprob_difference, |log π − log π_old| in nats; ratio, π/π_old; and 1 or 0 for each clip of Eq. 2's trust region:
    clip_low (Â < 0 and ratio < 1 − ε_low), clip_high (Â > 0 and ratio > 1 + ε_high), clip_dual (Â < 0 and ratio > c),
    NaN where Â is unknown. columns: logprob, old_logprob, advantage, [k] each, as in a token table.
    """
    logprob, old, advantage = (np.asarray(columns[n], np.float64) for n in ("logprob", "old_logprob", "advantage"))
    gap = logprob - old
    ratio, dual = np.exp(gap), math.inf if loss.clip_ratio_c is None else loss.clip_ratio_c
    cut = (
        (advantage < 0) & (ratio < 1 - loss.clip_ratio_low),
        (advantage > 0) & (ratio > 1 + loss.clip_ratio_high),
        (advantage < 0) & (ratio > dual),
    )
    found = {"logprob_difference": np.abs(gap), "ratio": ratio}
    return found | {name: np.where(np.isnan(advantage), np.nan, own) for name, own in zip(CLIPS, cut, strict=True)}


def off_policy_sentence(mean: str, worst: float) -> str:
    """Describe whether rollouts are on-policy. mean: formatted mean |Δ log π|; worst: the largest, in nats."""
    numbers = f"mean |Δ log π| {mean} nats, at most {digits(worst)}"
    if worst < ROUNDING:
        return f"The rollouts are on-policy up to rounding: {numbers}."
    return f"log π differs from the logged log π_old by more than rounding: {numbers}."


def describe_off_policyness(columns: Mapping[str, np.ndarray], loss: LossSettings) -> str:
    """Describe `off_policyness` in a sentence; without any known log π_old, the assumption made."""
    known = ~np.isnan(np.asarray(columns["old_logprob"], np.float64))
    if not known.any():
        return "There are no old log-probabilities: the rollouts count as on-policy (ratio 1)."
    names = ("logprob", "old_logprob", "advantage")
    found = off_policyness({name: np.asarray(columns[name])[known] for name in names}, loss)
    gap = found["logprob_difference"]
    words = off_policy_sentence(digits(gap.mean()), gap.max())
    cut = [f"{100 * found[name].mean():.2g} %" for name in CLIPS]
    if gap.max() < ROUNDING or np.isnan(found[CLIPS[0]]).any():
        return words
    return f"{words} Clipped low {cut[0]} of the tokens, high {cut[1]}, by the dual clip {cut[2]}."
