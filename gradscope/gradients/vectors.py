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
"""What is done with a gradient: called with the row of its weights and the parameter's name."""


@dataclass(frozen=True, eq=False)
class Vectors:
    """R vectors that are flat over a model's measured parameters, in memory or in a scratch file; edited in place."""

    rows: Float[Tensor, "R P"]
    slices: dict[str, slice]
    """Where each parameter lies in a row, by its name."""

    @classmethod
    def zeros(cls, model: nn.Module, count: int, memory: int | None = None) -> Vectors:
        """Make zeros in the parameters' widest dtype, float32 at least, on the model's device.

        Args:
            memory: bytes beyond which they lie in a scratch file on the host; None: none.

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
        """Some of the rows, in the same memory."""
        return Vectors(self.rows[rows], self.slices)

    def spans(self, size: int | None = None) -> Iterator[tuple[slice, list[tuple[str, slice, slice]]]]:
        """Cut a row into spans of at most `size` (None: PART) entries, each with the parameters that it crosses.

        Of each parameter: its name, where its part lies within the span, and which of its own entries that part is.

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
        """Inner products of the rows in float64, on the CPU."""
        return inner_products(self.rows)

    def norm_of_sum(self) -> float:
        """‖Σ_r row r‖, with a part of the sum in memory at a time."""
        return math.hypot(*(self.rows[:, span].sum(0).norm().item() for span, _ in self.spans()))


def inner_products(rows: Float[Tensor, "R P"]) -> Float[Tensor, "R R"]:
    """⟨row, row⟩ in float64 on the CPU, of which only some columns are widened at a time."""
    width = max(1, PART // max(1, len(rows)))
    return sum(part @ part.T for part in (p.double() for p in rows.split(width, dim=1))).cpu()


def zero_vectors(model: nn.Module, *leading: int) -> Float[Tensor, "*leading P"]:
    """Zeros that are flat over the measured parameters, in their widest dtype, float32 at least, on their device."""
    parameters = [p for _, p in float_parameters(model)]
    dtype = reduce(torch.promote_types, (p.dtype for p in parameters), torch.float32)
    return torch.zeros(*leading, sum(p.numel() for p in parameters), dtype=dtype, device=parameters[0].device)


def vector_bytes(model: nn.Module) -> int:
    """Bytes of one vector as long as the parameters."""
    one = zero_vectors(model, 0)
    return one.shape[1] * one.element_size()
