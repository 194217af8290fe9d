"""Vectors with an entry for every measured parameter: sums of token gradients, directions, displacements."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gradscope.policy import PART, flat_slices, float_parameters
from gradscope.runs import scratch_zeros

Take = Callable[[int, str, Tensor], None]
"""Callback (row, parameter's name, gradient)."""


@dataclass(frozen=True, eq=False)
class Vectors:
    """R vectors, flat over a model's measured parameters, in memory or in a scratch file; edited in place."""

    rows: Float[Tensor, "R P"]
    slices: dict[str, slice]
    """Parameter name → its entries in a row."""

    @classmethod
    def zeros(cls, model: nn.Module, count: int, memory: int | None = None) -> Vectors:
        """Allocate zeros in the parameters' widest dtype, at least float32, on the model's device.

        Args:
            memory: bytes beyond which a scratch file on the host is used; None: no limit.

        Raises:
            InputError: the disk has no room for the file.
        """
        if memory is None or count * vector_bytes(model) <= memory:
            return cls(zero_vectors(model, count), flat_slices(model))
        one = zero_vectors(model, 0)
        return cls(scratch_zeros(count, one.shape[1], dtype=one.dtype), flat_slices(model))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, rows: slice) -> Vectors:
        """Return a view of some rows."""
        return Vectors(self.rows[rows], self.slices)

    def spans(self, size: int | None = None) -> Iterator[tuple[slice, list[tuple[str, slice, slice]]]]:
        """Cut a row into spans of at most `size` (None: PART) entries, each with the parameters that it overlaps.

        A parameter is given by its name, the slice of the span, and the slice of its own entries.

        >>> list(Vectors.zeros(nn.Linear(3, 2), 1).spans(7))[1]
        (slice(7, 8, None), [('bias', slice(0, 1, None), slice(1, 2, None))])
        """
        end, size = self.rows.shape[1], size or PART
        for start in range(0, end, size):
            span = slice(start, min(start + size, end))
            crossed = []
            for name, part in self.slices.items():
                low, high = max(part.start, span.start), min(part.stop, span.stop)
                if low < high:
                    within = slice(low - span.start, high - span.start)
                    crossed.append((name, within, slice(low - part.start, high - part.start)))
            yield span, crossed

    def products(self) -> Float[Tensor, "R R"]:
        """Return the inner products of the rows, in float64 on the CPU."""
        return inner_products(self.rows)

    def norm_of_sum(self) -> float:
        """Return ‖Σ_r row r‖, holding one span of the sum at a time."""
        return math.hypot(*(self.rows[:, span].sum(0).norm().item() for span, _ in self.spans()))


def inner_products(rows: Float[Tensor, "R P"]) -> Float[Tensor, "R R"]:
    """Return the inner products of the rows in float64 on the CPU, converting some columns at a time."""
    width = max(1, PART // max(1, len(rows)))
    return sum(part @ part.T for part in (p.double() for p in rows.split(width, dim=1))).cpu()


def zero_vectors(model: nn.Module, *leading: int) -> Float[Tensor, "*leading P"]:
    """Return zeros, flat over the measured parameters, in their widest dtype (at least float32) on their device."""
    parameters = [p for _, p in float_parameters(model)]
    dtype = reduce(torch.promote_types, (p.dtype for p in parameters), torch.float32)
    return torch.zeros(*leading, sum(p.numel() for p in parameters), dtype=dtype, device=parameters[0].device)


def vector_bytes(model: nn.Module) -> int:
    """Return the bytes of one vector as long as the parameters."""
    one = zero_vectors(model, 0)
    return one.shape[1] * one.element_size()
