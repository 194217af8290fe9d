"""Token gradients of log π where rows were packed into one, with nothing that separates them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from gradscope.gradients import TokenJacobian, Vectors
from gradscope.objective import TokenStatistics
from gradscope.rollouts import Response, collate

FEW = 4
"""Rows in one up to which each number is tried, though it does not divide a part's."""


class PackedJacobian(TokenJacobian):
    """The Jacobian of log π where consecutive rows of a part are one, each seeing those before it.

    Where the temperature differs among a part's responses, that of the first is used.
    """

    def __init__(self, exact: TokenJacobian, part: Int[Tensor, " B"], *, restarting: bool) -> None:
        """restarting: whether each row's positions begin at 0, rather than where those of the row before it end."""
        super().__init__(exact.policy, exact.batch, exact.resources)
        batch, packs = self.batch, []
        self._places_of: list[tuple[list[int], Tensor]] = []
        for one in part.unique():
            own = part == one
            real = batch.attention_mask[own]
            ids, mask = (values[own][real].tolist() for values in (batch.input_ids, batch.response_mask))
            at = float(batch.temperature[own][0])
            packs.append(Response(ids[:1], ids[1:], group=len(packs), response_mask=mask[1:], temperature=at))
            if restarting:
                self._places_of.append((ids, (real.cumsum(1) - 1)[real]))
        self._order = part[batch.response_mask.nonzero()[:, 0]].argsort(stable=True)
        self._inside = TokenJacobian(exact.policy, collate(packs), replace(exact.resources, micro_batch=1))

    @property
    def statistics(self) -> TokenStatistics:
        with self._placing():
            found = self._inside.statistics
        back = self._order.argsort()
        return TokenStatistics(*(self.spread(self._inside.kept(values)[back]) for values in vars(found).values()))

    def vjp(self, weights: Float[Tensor, "R K"], of: Any = "logprob") -> Vectors:
        with self._placing():
            return self._inside.vjp(weights[:, self._order], of)

    @contextmanager
    def _placing(self) -> Iterator[None]:
        """Give the model the positions of the row that it is given, which is a pack up to some token."""

        def enter(_: nn.Module, args: tuple[Any, ...], given: Mapping[str, Any]) -> tuple[tuple[Any, ...], Any]:
            ids = given["input_ids"]
            own = ids[0].tolist()
            places = next((places for known, places in self._places_of if known[: len(own)] == own), None)
            if places is None:  # a pass that only shapes depend on
                return args, given
            return args, {**given, "position_ids": places[None, : len(own)].to(ids.device)}

        hook = self.model.register_forward_pre_hook(enter, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()


def packings(lengths: Int[Tensor, " B"], within: Int[Tensor, " B"]) -> Iterator[tuple[str, int, Int[Tensor, " B"]]]:
    """Yield ways to pack consecutive rows of each part: of PACKED, the most rows or tokens, and each row's pack.

    All rows of a part, few, equally many, or as many as fit into bins of powers of 2.

    >>> [(name, most, pack.tolist()) for name, most, pack in packings(torch.tensor([3, 1, 4]), torch.zeros(3).long())]
    [('packed', 3, [0, 0, 0]), ('packed', 2, [0, 0, 1])]
    """
    counts, place = within.unique(return_counts=True)[1], (within[:, None] == within).tril().sum(1) - 1
    most, seen = int(counts.max()), []
    sizes = (size for size in range(2, most) if size <= FEW or not (counts % size).any())
    ways = [("packed", size, place // size) for size in (most, *sizes)]
    budgets = (1 << power for power in range(int(lengths.max() - 1).bit_length(), int(lengths.sum()).bit_length()))
    ways += [("packed-bins", budget, _fill(lengths, within, budget)) for budget in budgets]
    for name, value, bin_ in ways:
        pack = (within * len(within) + bin_).unique(return_inverse=True)[1]
        if pack.tolist() not in seen and int(pack.max()) + 1 < len(pack):
            seen.append(pack.tolist())
            yield name, value, pack


def _fill(lengths: Int[Tensor, " B"], within: Int[Tensor, " B"], budget: int) -> Int[Tensor, " B"]:
    """Return the bin of each row in its part; a row that does not fit begins the next."""
    found, last = [], {}
    for length, part in zip(lengths.tolist(), within.tolist(), strict=True):
        number, used = last.get(part, (0, 0))
        last[part] = (number, used + length) if used + length <= budget else (number + 1, length)
        found.append(last[part][0])
    return torch.tensor(found)
