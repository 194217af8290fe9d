"""Random projections of gradients, whose inner products are those of the gradients up to a known error.

A CountSketch (Charikar, Chen and Farach-Colton, 2002) with a hash that needs no table of indices: the gradient of a
parameter, cut into rows of k numbers, is multiplied by random signs, each row is turned round by a shift of its own,
and all rows are added up. For vectors a and b, over the random signs and shifts,

    E⟨Sa, Sb⟩ = ⟨a, b⟩,    Var⟨Sa, Sb⟩ ≈ (‖a‖²‖b‖² + ⟨a, b⟩²) / k.

Sketches are linear: those of prompts add up to that of the batch. The k coordinates are alike, so that leaving out
blocks of them in turn (`jackknife_error`) shows how far any smooth statistic of the inner products is off.
"""

from __future__ import annotations

from math import ceil

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

SCATTERED = 64
"""Rows that a GPU adds up at a time."""
BLOCKS = 32
"""Blocks of coordinates, which the jackknife leaves out in turn."""


class Sketcher:
    """Projects gradients to `size` numbers; the same seed makes the same projection, for each parameter another."""

    def __init__(self, size: int, *, seed: int) -> None:
        self.size, self._seed = size, seed

    def add(self, gradient: Float[Tensor, " p"], parameter: int, into: Float[Tensor, " k"]) -> None:
        """Add the sketch of one parameter's flat gradient, the parameter's number being its place in the model."""
        draw = np.random.default_rng([self._seed, parameter])
        signs = torch.from_numpy(2 * draw.integers(0, 2, self.size, dtype=np.int8) - 1).to(into)
        rows = ceil(len(gradient) / self.size)
        # Shifts that differ, as far as there are: rows of one shift and much alike would add what no sign takes off.
        shifts = np.resize(draw.permutation(self.size)[:rows], rows)
        turned = 2 * draw.integers(0, 2, rows) - 1
        add = scatter_rows if into.device.type == "cuda" else add_rows
        add(gradient, signs, torch.from_numpy(shifts), torch.from_numpy(turned), into)


def add_rows(
    gradient: Float[Tensor, " p"],
    signs: Float[Tensor, " k"],
    shifts: Int[Tensor, " rows"],
    turned: Int[Tensor, " rows"],
    into: Float[Tensor, " k"],
) -> None:
    """Add rows of k numbers to `into`, each times the signs of its places and its own sign, rotated by its shift."""
    for row, shift, sign in zip(gradient.split(len(into)), shifts.tolist(), turned.tolist(), strict=True):
        # One sign for each place in a row, besides the row's own: rows of equal sign would meet in every shift.
        values = row.to(into) * signs[: len(row)]
        fits = min(len(values), len(into) - shift)
        into[shift : shift + fits].add_(values[:fits], alpha=sign)
        into[: len(values) - fits].add_(values[fits:], alpha=sign)


def scatter_rows(
    gradient: Float[Tensor, " p"],
    signs: Float[Tensor, " k"],
    shifts: Int[Tensor, " rows"],
    turned: Int[Tensor, " rows"],
    into: Float[Tensor, " k"],
) -> None:
    """Do the same with a few large operations: a GPU took longer to launch a row's four than to run them."""
    size, (shifts, turned) = len(into), (values.to(into.device) for values in (shifts, turned))
    for start in range(0, len(gradient), step := SCATTERED * size):
        part = gradient[start : start + step]
        place = torch.arange(len(part), device=into.device)
        row = start // size + place // size
        place %= size
        into.index_add_(0, (place + shifts[row]) % size, part.to(into) * signs[place] * turned[row].to(into))
