"""Weightings by entropy and surprisal, examples of a user's own file: `analyses/methods/entropy.py:gtpo:beta=0.2`.

STARE and STEER are as in their authors' code (read; github.com/hp-luo/STARE at bffb9e79, zz-haooo/STEER at b31df716:
verl/trainer/ppo/core_algos.py of both); the others are formulas as published, not verified against any code.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gradscope.objective import Tokens, Weighting, within


@dataclass(frozen=True)
class GTPO(Weighting):
    """w = [1 + β(H / mean H − 1)]·plain, over the batch's tokens (arXiv:2508.04349). Not verified."""

    NAME = "gtpo"
    beta: float = within(0.1, 0, 1)

    def factors(self, tokens: Tokens) -> np.ndarray:
        entropy = tokens.known("entropy")
        return (1 + self.beta * (entropy / entropy.mean() - 1)) * tokens.plain


@dataclass(frozen=True)
class RSIS(Weighting):
    """w = plain where low ≤ s/H ≤ high, else 0: surprisal in proportion to entropy (arXiv:2606.31575). Not verified."""

    NAME = "rsi-s"
    low: float = within(0.1, 0)
    high: float = within(3.0, 0, above="low")

    def factors(self, tokens: Tokens) -> np.ndarray:
        surprisal, entropy = -tokens.old, tokens.known("entropy")
        kept = (surprisal >= self.low * entropy) & (surprisal <= self.high * entropy)
        return np.where(kept, tokens.plain, 0.0)


@dataclass(frozen=True)
class STARE(Weighting):
    """w = factor·plain for the `share` of tokens with the largest surprisal −log π among those with Â > 0.

    Else plain; but factor_neg·plain for as large a share of those with Â < 0, in the authors' variant C2, .9; here 1,
    their O1. Each share is rounded up, at least one token. Only while the batch's mean entropy is below `target`, which
    like the factors stays as it is unless their `adaptive` is on (arXiv:2606.19236).
    """

    NAME = "stare"
    share: float = within(0.1, 0, 1)
    factor: float = within(1.1, 0)
    factor_neg: float = within(1.0, 0)
    target: float = within(0.3, 0)

    def factors(self, tokens: Tokens) -> np.ndarray:
        weights = tokens.plain.copy()
        if self.share == 0 or not tokens.known("entropy").mean() < self.target:
            return weights
        for side, factor in ((tokens.advantage > 0, self.factor), (tokens.advantage < 0, self.factor_neg)):
            own = np.flatnonzero(side)
            count = max(1, int(self.share * len(own) + 0.999999))  # the authors' ceil, which forgives rounding
            weights[own[np.argsort(tokens["logprob"][own], kind="stable")[:count]]] *= factor
        return weights


@dataclass(frozen=True)
class STEER(Weighting):
    """w = λ·plain, λ from `high` for the smallest estimated entropy change of the batch down to `low` for the largest.

    The change is Ω = |Â/π_old · π(1 − π)(ln π + H)|. With `linear` 1, λ falls linearly; with 0 it is exp(−kΩ), from 1
    down to `low`, k = −ln low / max(Ω_max, .02) (arXiv:2510.10150).
    """

    NAME = "steer"
    low: float = within(0.8, 1e-6, 1)
    high: float = within(1.2, 0, above="low")
    linear: int = within(1, 0, 1)

    def factors(self, tokens: Tokens) -> np.ndarray:
        prob = np.exp(tokens["logprob"]).clip(1e-8, 1 - 1e-8)
        spread = prob * (1 - prob) * (np.log(prob) + tokens.known("entropy"))
        change = np.abs(tokens.advantage / np.exp(tokens.old).clip(1e-8, 1) * spread)
        if self.linear:
            width = np.ptp(change)
            fall = (change - change.min()) / width if width > 0 else np.full_like(change, 0.5)
            return (self.high - (self.high - self.low) * fall) * tokens.plain
        return self.low ** (change / max(change.max(), 0.02)) * tokens.plain
