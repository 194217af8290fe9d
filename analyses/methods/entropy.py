"""Weightings by entropy and surprisal, as examples of a file of one's own: `analyses/methods/entropy.py:gtpo:beta=0.2`.

Not verified against the authors' code: each is its formula as published, on the columns of a token table.
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
    high: float = within(3.0, 0)

    def factors(self, tokens: Tokens) -> np.ndarray:
        surprisal, entropy = -tokens.old, tokens.known("entropy")
        kept = (surprisal >= self.low * entropy) & (surprisal <= self.high * entropy)
        return np.where(kept, tokens.plain, 0.0)


@dataclass(frozen=True)
class STARE(Weighting):
    """w = factor·plain for the `share` of tokens with the largest s among those with Â > 0, else plain.

    Only while the batch's mean entropy is below `target` (arXiv:2606.19236, which adapts it in training). Not verified.
    """

    NAME = "stare"
    share: float = within(0.1, 0, 1)
    factor: float = within(1.1, 0)
    target: float = within(1e9, 0)

    def factors(self, tokens: Tokens) -> np.ndarray:
        rose = np.flatnonzero(tokens.advantage > 0)
        if not tokens.known("entropy").mean() < self.target:
            return tokens.plain
        most = rose[np.argsort(tokens.old[rose], kind="stable")[: int(self.share * len(rose))]]
        weights = tokens.plain.copy()
        weights[most] *= self.factor
        return weights


@dataclass(frozen=True)
class STEER(Weighting):
    """w = λ·plain, λ from `high` for the smallest estimated entropy change of the batch down to `low` for the largest.

    The change is Ω = |Â/π_old · π(1 − π)(ln π + H)|. With `linear` 1, λ falls linearly; with 0 it is exp(−kΩ), from 1
    down to `low`, k = −ln low / max(Ω_max, .02) (arXiv:2510.10150; both as read in the authors' source). Not verified.
    """

    NAME = "steer"
    low: float = within(0.8, 1e-6, 1)
    high: float = within(1.2, 0)
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
