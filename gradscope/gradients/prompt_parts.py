"""The driver behind `TokenJacobian.contributions`: one prompt's gradient at a time, and its products with tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gradscope.errors import InputError, SelfCheckError
from gradscope.gradients.contributions import Contributions
from gradscope.gradients.engine.results import TOLERANCES
from gradscope.gradients.vectors import Vectors, vector_bytes
from gradscope.policy import arithmetic_dtype
from gradscope.runs import ALONE, SILENT, deal_by_cost, track

if TYPE_CHECKING:
    from gradscope.gradients.jacobian import TokenJacobian

LIVE = 3
"""Vectors held at once: a fold's sum, a prompt's, and the gradient as autograd returns it."""
FEWEST_FOLDS = 3
"""Fewest folds of which each can be left out and two prompts remain."""


class PromptParts:
    """The gradients G_p = Σ_{t in p} w_t·g_t of a batch's prompts; D = 1 or the given scale of each entry."""

    def __init__(
        self,
        J: TokenJacobian,
        weights: Float[Tensor, " K"],
        groups: Int[Tensor, " B"],
        scale: Float[Tensor, " P"] | None,
    ) -> None:
        self._jacobian, self._weights, self._groups, self._scale = J, weights, groups, scale
        self._live = J.spread(weights).any(1).nonzero()[:, 0]
        """Responses with a weight; the others contribute nothing."""
        self._places = J.spread(torch.arange(J.num_tokens))

    def contribute(self, folds: int | None, generator: torch.Generator) -> Contributions:
        """Compute the contributions, fold by fold, so that one fold's sum is held at a time."""
        J, weights, rows = self._jacobian, self._weights, self._live
        mask = J.batch.response_mask
        prompts, of_tokens = self._groups[:, None].expand_as(mask)[mask].unique(return_inverse=True)
        dealt = _deal(len(prompts), folds, generator)
        own, by_fold, differences = torch.zeros_like(weights), weights.new_zeros(folds or 1, len(weights)), [0.0]
        places = self._places_of(rows)
        for fold, along in enumerate(by_fold):
            parts = [part for p in prompts[dealt == fold] if len(part := rows[self._groups[rows] == p])]
            if not parts:
                continue
            found, total, checks = self._sum(parts)
            own += found
            usual = checks[:, 1].mean()
            differences.append(self._compare(*checks.unbind(1), least=usual))
            square = along.new_tensor([self._scale_twice(total)])
            along[places] = weights[places] * J.select(rows).jvp(total, exact=True).logprob[0].double()
            del total  # before the next one is made
            differences.append(self._compare(along[dealt[of_tokens] == fold].sum()[None], square, least=usual))
        extra = () if folds is None else (by_fold, dealt)
        return Contributions(by_fold.sum(0), own, of_tokens, len(prompts), max(differences), *extra)

    def _sum(self, parts: list[Int[Tensor, " _"]]) -> tuple[Float[Tensor, " K"], Vectors, Float[Tensor, "p 2"]]:
        """Return w_t⟨D ∘ g_t, D ∘ G_p⟩ of the tokens, Σ_p G_p, and by prompt the former's sum beside ‖D ∘ G_p‖².

        parts: the responses of each prompt.
        """
        J, processes = self._jacobian, self._jacobian.resources.processes
        one, memory = vector_bytes(J.model), J.resources.vectors
        total = Vectors.zeros(J.model, 1, None if LIVE * one <= memory else 0)
        inner = J.within(replace(J.resources, vectors=max(0, memory - one), processes=ALONE, progress=SILENT))
        own, checks = torch.zeros_like(self._weights), self._weights.new_zeros(len(parts), 2)
        costs = [float(J.batch.attention_mask[rows].sum()) for rows in parts]
        mine = deal_by_cost(range(len(parts)), costs, processes.count)[processes.rank]
        with processes.together():
            for number in track(mine, "gradients", J.resources.progress, unit="prompts"):
                checks[number] = self._add(inner.select(parts[number]), self._places_of(parts[number]), own, total)
        for shared in (total.rows, own, checks):
            processes.sum(shared)
        return own, total, checks

    def _add(
        self, part: TokenJacobian, places: Int[Tensor, " k"], own: Float[Tensor, " K"], total: Vectors
    ) -> Float[Tensor, "2"]:
        """Add one prompt, whose vector is freed on return; return the sum of `own` over its tokens and ‖D ∘ G_p‖²."""
        sums = part.vjp(self._weights[places][None])
        total.rows.add_(sums.rows)
        square = self._scale_twice(sums)
        own[places] = self._weights[places] * part.jvp(sums, exact=True).logprob[0].double()
        return own.new_tensor([own[places].sum(), square])

    def _places_of(self, rows: Int[Tensor, " b"]) -> Int[Tensor, " k"]:
        """Return the indices of these responses' kept tokens among all K."""
        return self._places[rows][self._jacobian.batch.response_mask[rows]]

    def _scale_twice(self, sums: Vectors) -> float:
        """Turn a vector u into D² ∘ u, in place, and return ‖D ∘ u‖²."""
        if self._scale is None:
            return float(sums.products())
        scale = self._scale.to(sums.rows)
        square = float(Vectors(sums.rows.mul_(scale), sums.slices).products())
        sums.rows.mul_(scale)
        return square

    def _compare(self, found: Float[Tensor, " p"], squares: Float[Tensor, " p"], *, least: Float[Tensor, ""]) -> float:
        """Return the largest difference from squared norms, relative to them or to `least`, or raise SelfCheckError.

        least: a usual squared norm. Where the tokens of one prompt cancel, rounding is all that is left of its own.
        """
        size = torch.maximum(squares, least).clamp(min=torch.finfo(squares.dtype).tiny)
        worst = float(((found - squares).abs() / size).nan_to_num(nan=torch.inf).max())
        tolerance = 2 * TOLERANCES[arithmetic_dtype(self._jacobian.model)]  # those are of norms
        if not worst <= tolerance:
            raise SelfCheckError(
                f"self-check failed: products of token gradients with their sum differ from its squared norm by "
                f"{worst:.1e} (tolerance {tolerance:.0e}); nothing was measured. Please report the architecture"
            )
        return worst


def _deal(count: int, folds: int | None, generator: torch.Generator) -> Int[Tensor, " n"]:
    """Deal prompts to folds of (almost) equal size at random; return each prompt's fold."""
    if folds is None:
        return torch.zeros(count, dtype=torch.long)
    if not FEWEST_FOLDS <= folds <= count:
        raise InputError(f"folds is {folds}; give {FEWEST_FOLDS} to {count}, the number of prompts")
    return torch.randperm(count, generator=generator) % folds
