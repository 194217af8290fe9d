"""Random projections of gradients that preserve inner products up to a known error.

A CountSketch (Charikar, Chen and Farach-Colton, 2002) with a hash that needs no table of indices: the gradient of a
parameter is cut into rows of k numbers and multiplied by random signs, each row is rotated by its own random shift, and
all rows are added up. For vectors a and b, over the random signs and shifts,

    E⟨Sa, Sb⟩ = ⟨a, b⟩,    Var⟨Sa, Sb⟩ ≈ (‖a‖²‖b‖² + ⟨a, b⟩²) / k.

Sketches are linear: those of prompts add up to that of the batch. The k coordinates are exchangeable, so a jackknife
over blocks of them (`jackknife_error`) estimates the error of any smooth statistic of the inner products.
"""

from __future__ import annotations

from math import ceil

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

SCATTERED = 64
"""Rows added up at a time on a GPU."""
BLOCKS = 32
"""Blocks of coordinates for the jackknife."""


class Sketcher:
    """Projects gradients to `size` numbers; the seed and the parameter determine the projection."""

    def __init__(self, size: int, *, seed: int) -> None:
        self.size, self._seed = size, seed

    def add(self, gradient: Float[Tensor, " p"], parameter: int, into: Float[Tensor, " k"]) -> None:
        """Add the sketch of one parameter's flat gradient; `parameter` is its index in the model."""
        draw = np.random.default_rng([self._seed, parameter])
        signs = torch.from_numpy(2 * draw.integers(0, 2, self.size, dtype=np.int8) - 1).to(into)
        rows = ceil(len(gradient) / self.size)
        # Distinct shifts as far as possible: similar rows with one shift would add an error that no sign cancels.
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
    """Add rows of k numbers to `into`, each multiplied by the signs of its entries and of the row, and rotated."""
    for row, shift, sign in zip(gradient.split(len(into)), shifts.tolist(), turned.tolist(), strict=True):
        # A sign per entry besides the row's: with one sign a row, two rows would correlate under every shift.
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
    """Do the same in a few large operations: on a GPU, launching four per row took longer than running them."""
    size, (shifts, turned) = len(into), (values.to(into.device) for values in (shifts, turned))
    for start in range(0, len(gradient), step := SCATTERED * size):
        part = gradient[start : start + step]
        place = torch.arange(len(part), device=into.device)
        row = start // size + place // size
        place %= size
        into.index_add_(0, (place + shifts[row]) % size, part.to(into) * signs[place] * turned[row].to(into))
