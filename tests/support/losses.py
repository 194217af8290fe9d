"""The papers' formulas, one token at a time in Python floats; nothing of them is gradscope.objective's.

Eq. 1, 2, 20 and 21 of arXiv:2505.12929 and DAPO's clips. settings: whatever has clip_ratio_low, clip_ratio_high,
clip_ratio_c and kl_coef.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any


def grpo_by_loop(rewards: Sequence[float], groups: Sequence[int], eps: float = 1e-6) -> list[float]:
    """(R − mean) / (sample standard deviation + eps) of each response's group; 0 where its rewards are equal."""
    advantages = []
    for reward, group in zip(rewards, groups, strict=True):
        members = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        same = len(set(members)) == 1
        advantages.append(0.0 if same else (reward - statistics.mean(members)) / (statistics.stdev(members) + eps))
    return advantages


def reinforce_pp_by_loop(
    rewards: list[float], old: list[list[float]], ref: list[list[float]], mask: list[list[bool]], beta: float
) -> dict[tuple[int, int], float]:
    """A_t = R − β Σ_{j≥t} log(π_old/π_ref) over kept tokens, whitened over all kept tokens of the batch."""
    returns = {}
    for i, row in enumerate(mask):
        for t, kept in enumerate(row):
            if kept:
                later = [old[i][j] - ref[i][j] for j in range(t, len(row)) if row[j]]
                returns[i, t] = rewards[i] - beta * math.fsum(later)
    mean, variance = statistics.mean(returns.values()), statistics.variance(returns.values())
    return {place: (value - mean) / math.sqrt(variance + 1e-8) for place, value in returns.items()}


def term_by_loop(new: float, old: float, ref: float, advantage: float, settings: Any) -> float:
    """One token's min(r·Â, clip(r)·Â) − β·k3 as Eq. 1 writes it, dual clip as max(…, c·Â) for Â < 0."""
    ratio = math.exp(new - old)
    clipped = min(max(ratio, 1 - settings.clip_ratio_low), 1 + settings.clip_ratio_high)
    surrogate = min(ratio * advantage, clipped * advantage)
    if settings.clip_ratio_c is not None and advantage < 0:
        surrogate = max(surrogate, settings.clip_ratio_c * advantage)
    return surrogate - (settings.kl_coef * (math.exp(ref - new) - (ref - new) - 1) if settings.kl_coef else 0.0)


def weight_by_loop(new: float, old: float, ref: float, advantage: float, settings: Any) -> tuple[float, str]:
    """One token's Eq. 2 weight, r·Â·I_trust + β·π_ref/π_θ − β, and which clip has removed its first part."""
    ratio, clip = math.exp(new - old), ""
    if advantage > 0 and ratio > 1 + settings.clip_ratio_high:
        clip = "high"
    elif advantage < 0 and ratio < 1 - settings.clip_ratio_low:
        clip = "low"
    elif settings.clip_ratio_c is not None and advantage < 0 and ratio > settings.clip_ratio_c:
        clip = "dual"
    weight = 0.0 if clip else ratio * advantage
    return weight + (settings.kl_coef * (math.exp(ref - new) - 1) if settings.kl_coef else 0.0), clip
