"""The driver behind `TokenJacobian.contributions`: one prompt's gradient at a time, and its products with tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gradscope.errors import InputError, SelfCheckError
from gradscope.gradients.engine.results import TOLERANCES
from gradscope.gradients.operator.contributions import Contributions
from gradscope.gradients.operator.forward_mode import TANGENTS, TOGETHER
from gradscope.gradients.operator.vectors import Vectors, vector_bytes
from gradscope.objective import Quantity
from gradscope.policy import arithmetic_dtype
from gradscope.runs import ALONE, SILENT, deal_by_cost, track

if TYPE_CHECKING:
    from gradscope.gradients.operator.jacobian import TokenJacobian

BESIDE = 2
"""Vectors held beside the folds' sums: a prompt's, and the gradient as autograd returns it."""
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
        of: Quantity,
    ) -> None:
        self._jacobian, self._weights, self._groups, self._scale, self._of = J, weights, groups, scale, of
        self._live = J.spread(weights).any(1).nonzero()[:, 0]
        """Responses with a weight; the others contribute nothing."""
        mask = J.batch.response_mask
        self._places = (mask.flatten().cumsum(0) - 1).view(mask.shape)
        """Index of each kept token among all K."""
        self._worst = 0.0
        """Largest difference that the self-check has seen."""

    def contribute(self, folds: int | None, generator: torch.Generator) -> Contributions:
        """Compute the contributions, as many folds at a time as are faster together."""
        J, weights, mask = self._jacobian, self._weights, self._jacobian.batch.response_mask
        prompts, of_tokens = self._groups[:, None].expand_as(mask)[mask].unique(return_inverse=True)
        dealt = _deal(len(prompts), folds, generator)
        own, by_fold = torch.zeros_like(weights), weights.new_zeros(folds or 1, len(weights))
        one, memory, live = vector_bytes(J.model), J.resources.vectors, self._places_of(self._live)
        at_once = max(1, min(TOGETHER, TANGENTS // one, memory // one - BESIDE))
        inner = replace(J.resources, vectors=max(0, memory - at_once * one), processes=ALONE, progress=SILENT)
        for chosen in torch.arange(len(by_fold)).split(at_once) if len(live) else ():
            sums = Vectors.zeros(J.model, len(chosen), None if (len(chosen) + BESIDE) * one <= memory else 0)
            each = [sums[place : place + 1] for place in range(len(chosen))]
            usual = [
                self._add_prompts(J.within(inner), prompts[dealt == fold], own, total)
                for fold, total in zip(chosen, each, strict=True)
            ]
            squares = [self._scale_twice(total) for total in each]
            changes = J.select(self._live).jvp(sums, [self._of], exact=True).values[..., 0].double()
            del sums, each  # before the next ones are made
            by_fold[chosen[:, None], live] = weights[live] * changes
            for fold, square, least in zip(chosen, squares, usual, strict=True):
                found = by_fold[fold, dealt[of_tokens] == fold].sum()
                self._compare(found[None], found.new_tensor([square]), least=least)
        extra = () if folds is None else (by_fold, dealt)
        return Contributions(by_fold.sum(0), own, of_tokens, len(prompts), self._worst, *extra)

    def _add_prompts(
        self, J: TokenJacobian, prompts: Int[Tensor, " n"], own: Float[Tensor, " K"], total: Vectors
    ) -> float:
        """Add w_t⟨D ∘ g_t, D ∘ G_p⟩ of the prompts' tokens to `own` and Σ_p G_p to `total`; return the mean ‖D ∘ G_p‖².

        J: the Jacobian for this process alone.
        """
        parts = [rows for p in prompts if len(rows := self._live[self._groups[self._live] == p])]
        if not parts:
            return 0.0
        processes, progress = self._jacobian.resources.processes, self._jacobian.resources.progress
        costs = [float(J.batch.attention_mask[rows].sum()) for rows in parts]
        mine = deal_by_cost(range(len(parts)), costs, processes.count)[processes.rank]
        found, checks = torch.zeros_like(own), own.new_zeros(len(parts), 2)
        with processes.together():
            for number in track(mine, "gradients", progress, unit="prompts"):
                places = self._places_of(parts[number])
                checks[number] = self._add_prompt(J.select(parts[number]), places, found, total)
        for shared in (total.rows, found, checks):
            processes.sum(shared)
        own += found
        usual = float(checks[:, 1].mean())
        self._compare(*checks.unbind(1), least=usual)
        return usual

    def _add_prompt(
        self, part: TokenJacobian, places: Int[Tensor, " k"], own: Float[Tensor, " K"], total: Vectors
    ) -> Float[Tensor, "2"]:
        """Add one prompt, whose vector is freed on return; return the sum of `own` over its tokens and ‖D ∘ G_p‖²."""
        sums = part.vjp(self._weights[places][None], self._of)
        total.rows.add_(sums.rows)
        square = self._scale_twice(sums)
        changes = part.jvp(sums, [self._of], exact=True).values[0, :, 0]
        own[places] = self._weights[places] * changes.double()
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

    def _compare(self, found: Float[Tensor, " p"], squares: Float[Tensor, " p"], *, least: float) -> None:
        """Compare sums with the squared norms that they equal, relative to these or to `least`.

        least: a usual squared norm. Where the tokens of one prompt cancel, rounding is all that is left of its own.
        """
        size = squares.clamp(min=max(least, torch.finfo(squares.dtype).tiny))
        worst = float(((found - squares).abs() / size).nan_to_num(nan=torch.inf).max())
        tolerance = 2 * TOLERANCES[arithmetic_dtype(self._jacobian.model)]  # those are of norms
        if not worst <= tolerance:
            raise SelfCheckError(
                f"self-check failed: products of token gradients with their sum differ from its squared norm by "
                f"{worst:.1e} (tolerance {tolerance:.0e}); nothing was measured. Please report the architecture"
            )
        self._worst = max(self._worst, worst)


def _deal(count: int, folds: int | None, generator: torch.Generator) -> Int[Tensor, " n"]:
    """Deal prompts to folds of (almost) equal size at random; return each prompt's fold."""
    if folds is None:
        return torch.zeros(count, dtype=torch.long)
    if not FEWEST_FOLDS <= folds <= count:
        raise InputError(f"folds is {folds}; give {FEWEST_FOLDS} to {count}, the number of prompts")
    return torch.randperm(count, generator=generator) % folds
