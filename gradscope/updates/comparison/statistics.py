"""Compute each row's statistics and their differences to the first, plain row: ratios of sums over redrawn prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from jaxtyping import Float

from gradscope.gradients import ADAMW, LOGITS, PARAMETERS, stands_for
from gradscope.objective import clip_scale
from gradscope.resampling import bootstrap, prompt_clusters
from gradscope.updates.comparison.noise import norms_and_cosines, signal_to_noise, signal_to_noise_difference
from gradscope.updates.comparison.passes import Passes

Found = Float[np.ndarray, "3 *_"]
"""Values, lower and upper bounds."""
DIFFERENCE = "_difference"
BOUNDS = ("", "_lower", "_upper")


@dataclass(frozen=True)
class Judge:
    """Judges rows of weights on the tokens of one table; all statistics see the same draws of prompts."""

    table: pd.DataFrame
    labels: Sequence[str]
    seed: int
    confidence: float
    resamples: int

    def judge(
        self, weights: Float[np.ndarray, "R K"], passes: Passes
    ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Return the numbers of each row, [R], and of its intervals, [R·A], by column."""
        carried, energy = self.energies(weights)
        if ADAMW in self.table and self.table[ADAMW].notna().any():
            more = self.energies(weights, ADAMW, "_adamw")
            carried, energy = carried | more[0], energy | more[1]
        numbers = columns(self.gradients(weights, passes) | carried) | {"zero_share": (weights == 0).mean(1)}
        return numbers, columns(energy) | {"gradient_share": self.gradient_shares(weights, passes).ravel()}

    def directions(self, name: str, changes: Float[np.ndarray, "R K"]) -> dict[str, Found]:
        """Return the share of tokens that move with their advantage, among those that have one and move."""
        wanted = np.sign(self.table["advantage"].to_numpy(np.float64))
        moved = (wanted != 0) & (changes != 0)
        right = self._by_prompt(moved & (np.sign(changes) == wanted))
        return self._ratios(name, right, self._by_prompt(moved))

    def gradients(self, weights: Float[np.ndarray, "R K"], passes: Passes) -> dict[str, Found]:
        """Return norm ratio, cosines and signal to noise of the summed gradients, and directions along them."""
        ratios, cosines = norms_and_cosines(passes.products, confidence=self.confidence)
        numbers = {
            "norm_ratio": ratios,
            "cosine": cosines,
            "cosine_from_energies": self.cosines_from_energies(weights),
            "signal_to_noise": signal_to_noise(passes.products, confidence=self.confidence),
            f"signal_to_noise{DIFFERENCE}": signal_to_noise_difference(passes.products, confidence=self.confidence),
        } | self.directions("right_sgd", passes.changes)
        if passes.adamw_changes is not None:
            numbers |= self.directions("right_adamw", passes.adamw_changes)
        return numbers

    def gains(self, gains: Float[np.ndarray, "R n"]) -> dict[str, Found]:
        """Return the mean over prompts."""
        return self._ratios("gain", gains.T, np.ones_like(gains.T))

    def entropy(
        self, weights: Float[np.ndarray, "R K"], passes: Passes, max_grad_norm: float | None
    ) -> dict[str, Found]:
        """Return the first-order change of the mean entropy by a step along each sum, clipped by its own norm."""
        norms = np.sqrt(np.maximum(passes.products.along.sum(-1), 0.0))
        clips = np.array([clip_scale(norm, max_grad_norm) for norm in norms])
        parts = self._by_prompt(-weights * passes.entropy_slopes * (clips / clips[0])[:, None])
        tokens = self._by_prompt(np.ones((1, len(self.table))))
        return self._ratios("entropy_change", parts, np.broadcast_to(tokens, parts.shape))

    def energies(
        self, weights: Float[np.ndarray, "R K"], norm: str = PARAMETERS, end: str = ""
    ) -> tuple[dict[str, Found], dict[str, Found]]:
        """Return the share of tokens that carry the update, [R], and shares of Σ w²‖g‖² by interval, [R, A].

        norm: the column of ‖g‖; end: suffix of the numbers' names.
        """
        energy = self._by_prompt(self._estimate(weights**2, 2, norm)[:, None] * self._inside())
        whole = energy.sum(2, keepdims=True)
        # (Σ|w|‖g‖)² / (Σw²‖g‖² · number of tokens)
        parts = self._by_prompt(self._estimate(np.abs(weights), 1, norm)), whole[..., 0]
        tokens = self._by_prompt(np.ones((1, len(self.table))))
        carried = self._bootstrap(
            f"effective_share{end}", (*parts, tokens), lambda over, squares, n: over**2 / squares / n
        )
        return carried, self._ratios(f"energy_share{end}", energy, np.broadcast_to(whole, energy.shape))

    def cosines_from_energies(self, weights: Float[np.ndarray, "R K"]) -> Found:
        """Return the cosine with the first row's sum that any token gradients of these norms would have if they were
        orthogonal: Σ w₀w‖g‖² / √(Σ w₀²‖g‖² · Σ w²‖g‖²), that is Σ r·e / √(Σ e · Σ r²·e) with the first row's energies
        e and r = w/w₀.
        """
        parts = self._by_prompt(self._estimate(weights[0] * weights, 2)), self._by_prompt(self._estimate(weights**2, 2))
        found = self._bootstrap("", parts, lambda cross, own: cross / np.sqrt(own[:, :1] * own))[""]
        return np.clip(found, -1.0, 1.0)

    def _estimate(
        self, factors: Float[np.ndarray, "R K"], power: int, norm: str = PARAMETERS
    ) -> Float[np.ndarray, "R K"]:
        """Return factor·‖g‖^power of each measured token, times the tokens that it stands for; 0 for the others."""
        norms = self.table[norm].to_numpy(np.float64)
        known, logits = ~np.isnan(norms), self.table[LOGITS].to_numpy(np.float64)
        stand = [stands_for(self.table, known, proxies) for proxies in np.abs(factors) * logits**power]
        return np.where(known, stand, 0.0) * factors * np.where(known, norms, 0.0) ** power

    def gradient_shares(self, weights: Float[np.ndarray, "R K"], passes: Passes) -> Float[np.ndarray, "R A"]:
        """Return ⟨U_a, U⟩/‖U‖² of each interval."""
        parts = (weights * passes.changes) @ self._inside().T
        with np.errstate(invalid="ignore", divide="ignore"):
            return parts / parts.sum(1, keepdims=True)

    def _inside(self) -> Float[np.ndarray, "A K"]:
        return (self.table["interval"].to_numpy() == np.arange(len(self.labels))[:, None]).astype(np.float64)

    def _by_prompt(self, values: np.ndarray) -> Float[np.ndarray, "n *k"]:
        """Sum [*k, K] over the tokens of each prompt."""
        clusters = prompt_clusters(self.table)
        flat = np.asarray(values, dtype=np.float64).reshape(-1, len(clusters))
        sums = np.stack([np.bincount(clusters, row, minlength=int(clusters.max()) + 1) for row in flat], axis=1)
        return sums.reshape(-1, *np.shape(values)[:-1])

    def _ratios(self, name: str, over: np.ndarray, under: np.ndarray) -> dict[str, Found]:
        return self._bootstrap(name, (over, under), lambda over, under: over / under)

    def _bootstrap(self, name: str, sums: Sequence[np.ndarray], divide: Callable[..., np.ndarray]) -> dict[str, Found]:
        """Apply `divide` to sums over redrawn prompts; return the result, and its difference to the first row's."""
        shape = sums[0].shape[1:]

        def evaluate(draws: np.ndarray) -> np.ndarray:
            with np.errstate(invalid="ignore", divide="ignore"):  # nothing moved, nothing measured
                values = divide(*(np.tensordot(draws.astype(np.float64), part, 1) for part in sums))
            values = np.where(np.isfinite(values), values, np.nan)
            return np.stack([values, values - values[:, :1]], axis=1).reshape(len(draws), -1)

        settings = {"confidence": self.confidence, "resamples": self.resamples}
        found = bootstrap(evaluate, len(sums[0]), seed=np.random.default_rng(self.seed), **settings)
        found = found.reshape(3, 2, *shape)
        return {name: found[:, 0], f"{name}{DIFFERENCE}": found[:, 1]}


def columns(numbers: dict[str, Found]) -> dict[str, np.ndarray]:
    """Split each number into columns NAME, NAME_lower and NAME_upper."""
    return {f"{name}{end}": found[i].ravel() for name, found in numbers.items() for i, end in enumerate(BOUNDS)}
