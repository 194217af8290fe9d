"""Planted worlds: populations of prompts with known truth, and batches drawn from them.

A world, drawn from a seed, fixes what is true of the population of prompts for each kind of headline: tokens (which
hold the energy, where, what it follows), summed gradients (shares, signal) and the movement of tokens (influence,
directions). Prompts differ: in length, in size of gradient (log-normal, up to a standard deviation of 1.2 in the
logarithm), and up to 60 % of them have no advantage at all.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

EDGES = np.array([0.0, 0.25, 0.5, 0.75, 1.0])
CLASSES = ("word", "7", ".", " ")
"""A token of each class of `theory.token_classes`."""


@dataclass(frozen=True)
class TokenWorld:
    """Tokens with weights and gradient norms."""

    shares: np.ndarray
    """Chance of a token to be in each interval."""
    length: float
    """Mean tokens of a prompt."""
    power: float
    """Norms go as (1−π)^power."""
    lift: np.ndarray
    """Log of a further factor of each interval."""
    by_class: np.ndarray
    """Log of each class's further factor."""
    by_position: float
    """Log factor from a response's begin to its end."""
    by_entropy: float
    noise: float
    """Standard deviation of log norm among tokens."""
    spread: float
    """The same among prompts."""
    idle: float
    """Chance of a prompt to have no advantage."""

    @staticmethod
    def draw(rng: np.random.Generator) -> TokenWorld:
        low = rng.choice([0.01, 0.03, 0.08])
        shares = np.array([low, 0.03, 0.05, 0.92 - low])
        # From shares of the energy that are about equal to one that holds nearly all.
        lift = np.log(rng.dirichlet([1.5] * 4) / shares) * rng.choice([0.0, 0.3, 0.6])
        quiet = rng.random(3) < 0.5
        return TokenWorld(
            shares=shares,
            length=float(rng.uniform(80, 250)),
            power=float(rng.uniform(0.5, 1.3)),
            lift=lift - lift.max(),
            by_class=np.zeros(4) if quiet[0] else rng.normal(0, 0.5, 4),
            by_position=0.0 if quiet[1] else float(rng.normal(0, 0.8)),
            by_entropy=0.0 if quiet[2] else float(rng.uniform(0, 1.5)),
            noise=float(rng.uniform(0.3, 1.0)),
            spread=float(rng.uniform(0.0, 1.2)),
            idle=float(rng.choice([0.0, 0.3, 0.6])),
        )

    def sample(self, prompts: int, rng: np.random.Generator) -> pd.DataFrame:
        """A token table of so many prompts, with all that the sentences on tokens are made of."""
        counts = np.maximum(2, rng.poisson(self.length * np.exp(0.3 * rng.standard_normal(prompts))))
        group = np.repeat(np.arange(prompts), counts)
        size = len(group)
        interval = rng.choice(4, size=size, p=self.shares)
        rest = 1 - rng.uniform(EDGES[interval], EDGES[interval + 1])
        rest = np.where(interval == 3, 0.25 * rng.random(size) ** 4 + 1e-6, rest)
        entropy = 2.5 * np.clip(rest + 0.25 * rng.standard_normal(size), 0, None)
        position = np.concatenate([np.arange(count) for count in counts])
        kind = rng.integers(4, size=size)
        at = position / counts[group]
        log = self.power * np.log(rest) + self.lift[interval] + self.by_class[kind] + self.by_position * at
        log += self.by_entropy * entropy + self.noise * rng.standard_normal(size)
        log += (self.spread * rng.standard_normal(prompts))[group]
        # Which prompts' improbable tokens are large differs, too.
        log += (0.5 * self.spread * rng.standard_normal((prompts, 4)))[group, interval]
        advantage = np.where(rng.random(prompts) < self.idle, 0.0, 1.0)[group] * rng.choice([-1.0, 1.0], size=size)
        norm = np.exp(log)
        columns = {"response": group, "group": group, "position": position, "token": np.array(CLASSES, object)[kind]}
        columns |= {"prob": 1 - rest, "log_one_minus_prob": np.log(rest), "entropy": entropy, "advantage": advantage}
        columns |= {"weight": advantage, "interval": interval, "logit_grad_norm": rest, "param_grad_norm": norm}
        return pd.DataFrame(columns | {"act_grad_norm.0": norm})


@dataclass(frozen=True)
class GradientWorld:
    """Summed gradients of intervals: g_{p,a} = f_p · (mean_a + noise_a · ε), in so many dimensions."""

    means: np.ndarray
    """[A, d]."""
    noise: np.ndarray
    """[A], per dimension."""
    tokens: np.ndarray
    """Mean tokens of a prompt in each interval."""
    spread: float

    @staticmethod
    def draw(rng: np.random.Generator) -> GradientWorld:
        sizes = rng.dirichlet([1.0] * 4) * rng.choice([0.0, 0.3, 1.0])
        sizes = np.where(rng.random(4) < 0.25, 0.0, sizes)  # intervals without any signal
        means = sizes[:, None] * rng.standard_normal((4, 24)) / np.sqrt(24)
        low = rng.choice([2.0, 10.0, 30.0])
        tokens = np.array([low, 8.0, 12.0, 200.0])
        return GradientWorld(means, rng.dirichlet([1.5] * 4), tokens, float(rng.uniform(0, 1.0)))

    def sample(self, prompts: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """(inner products [n, A, n, A], tokens [n, A]) of a batch."""
        factor = np.exp(self.spread * rng.standard_normal(prompts))[:, None, None]
        noise = self.noise[:, None] * rng.standard_normal((prompts, *self.means.shape))
        vectors = factor * (self.means + noise)
        return np.einsum("pad,qbd->paqb", vectors, vectors), rng.poisson(self.tokens, (prompts, 4)).astype(float)

    def shares(self, prompts: int) -> np.ndarray:
        """E⟨G_a, G⟩/E‖G‖² of batches of so many prompts."""
        first, second = np.exp(self.spread**2 / 2), np.exp(2 * self.spread**2)
        own = self.means @ self.means.sum(0) + self.noise**2 * self.means.shape[1]
        along = prompts * second * own + prompts * (prompts - 1) * first**2 * (self.means @ self.means.sum(0))
        return along / along.sum()

    def has_signal(self) -> np.ndarray:
        """Whether E g_a is not 0: for each interval and, last, for all together."""
        return np.append((self.means != 0).any(1), (self.means.sum(0) != 0).any())


@dataclass(frozen=True)
class MovementWorld:
    """What a step does: contributions of sources to the top interval's tokens, and which tokens move the right way."""

    sizes: np.ndarray
    """Standard deviation of each interval's contribution."""
    shared: float
    """Part of a contribution's variance that a prompt's tokens share."""
    right: np.ndarray
    """Chance to move the right way: Â > 0, Â < 0."""
    spread: float
    """Standard deviation of its logit among prompts."""

    @staticmethod
    def draw(rng: np.random.Generator) -> MovementWorld:
        right = 0.5 + rng.choice([0.0, 0.02, 0.06, 0.15], size=2) * rng.choice([-1, 1], size=2)
        sizes = np.sqrt(rng.dirichlet([1.5] * 4))
        return MovementWorld(sizes, float(rng.uniform(0, 0.5)), right, float(rng.uniform(0, 0.8)))

    def sample(self, prompts: int, rng: np.random.Generator) -> pd.DataFrame:
        """Draw contributions and directions of the top interval's tokens."""
        counts = np.maximum(2, rng.poisson(60 * np.exp(0.4 * rng.standard_normal(prompts))))
        group = np.repeat(np.arange(prompts), counts)
        common = np.exp(0.5 * rng.standard_normal(prompts))[group]
        parts = self.sizes * (
            np.sqrt(self.shared) * rng.standard_normal((prompts, 4))[group]
            + np.sqrt(1 - self.shared) * rng.standard_normal((len(group), 4))
        )
        parts *= common[:, None]
        sign = rng.choice([-1.0, 1.0], size=len(group))
        logit = np.log(self.right / (1 - self.right))[(sign < 0).astype(int)]
        moved = rng.random(len(group)) < 1 / (1 + np.exp(-logit - (self.spread * rng.standard_normal(prompts))[group]))
        columns = {f"by.{place}": parts[:, place] for place in range(4)}
        columns |= {"predicted": parts.sum(1), "group": group, "interval": 3, "advantage": sign}
        return pd.DataFrame(columns | {"delta_log_odds.all": sign * np.where(moved, 1.0, -1.0)})
