"""Advantages that are shifted and scaled anew in each part of a batch, as whitening them again does.

The trainer's gradient T is then KL's part and Σ_p (a_p·Σ_t c_t·Â_t·u_t·g_t + b_p·Σ_t c_t·u_t·g_t), with u_t the weight
for Â = ±1 over that: two numbers for each part p, whatever mean and deviation were taken over.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gradscope.updates.auditing.readings import Reading, Readings, Weights
from gradscope.updates.auditing.wording import EQUAL

BEYOND = 2
"""Values of advantages, in the parts where they change, that are needed beyond the two numbers of each."""
CLOSE, HOPEFUL = 0.01, 0.4
"""Largest share of ‖T‖ that a fit may leave to be tried, or to be made again with other signs of advantages."""
TRIES = 3
"""Most fits, each with tokens clipped by the signs that the one before gave."""


class _Fit(NamedTuple):
    """A fit of a_p and b_p."""

    far: bool
    """Whether it leaves more than CLOSE."""
    parts: int
    left: float
    """Share of ‖T‖."""
    reading: Reading
    advantages: Float[Tensor, "B S"]


def find_whitened(
    readings: Readings, along: Float[np.ndarray, " K"], square: float, aggregations: Sequence[str]
) -> Iterator[tuple[Reading, Weights]]:
    """Yield the reading of a fit that leaves little, if any does; costs a Gram of all responses.

    readings: on all real tokens. along: −⟨∇ log π_t, T⟩. square: ‖T‖².
    """
    given = readings.columns.batch.advantages
    if given is None or readings.loss.is_whole or readings.terms.parts[2].any():
        return
    given = torch.where(readings.kept, given, 0.0).double()
    unit = _unit(readings, given)
    for _ in range(TRIES):
        fits = _fits(readings, given, unit, along, square, aggregations)
        best = min(fits, key=lambda fit: (fit.far, 0 if fit.far else fit.parts, fit.left), default=None)
        if best is None or best.left > HOPEFUL:
            return
        if torch.equal(moved := _unit(readings, best.advantages), unit):
            if not best.far:
                terms = readings.weigh(readings.columns.with_advantages(best.advantages))
                yield best.reading, readings.aggregate(terms)[best.reading.aggregation]
            return
        unit = moved


def _unit(readings: Readings, advantages: Float[Tensor, "B S"]) -> Float[Tensor, " K"]:
    """Return u_t, with tokens clipped as the signs of these advantages say."""
    signs = torch.where(advantages < 0, -1.0, 1.0)
    terms = readings.weigh(readings.columns.with_advantages(signs))
    return terms.parts[0] * terms.mask[0] * readings.J.kept(signs)


def _parts(readings: Readings) -> Iterator[tuple[str, float | None, Int[Tensor, " B"]]]:
    """Yield where advantages may be whitened, its number, and each response's part."""
    rows = torch.arange(len(readings.J.batch))
    yield "batch", None, torch.zeros_like(rows)
    yield from ((name, None, part) for name, part in readings.rows.parts.items())
    if "micro-batches" not in readings.rows.parts:
        sizes = (size for size in range(3, len(rows) // 2 + 1) if len(rows) % size == 0)
        yield from (("parts", len(rows) // size, rows // size) for size in sizes)


def _fits(
    readings: Readings,
    given: Float[Tensor, "B S"],
    unit: Float[Tensor, " K"],
    along: Float[np.ndarray, " K"],
    square: float,
    aggregations: Sequence[str],
) -> Iterator[_Fit]:
    """Yield the fits, of all averages and parts, that tell whitening from other weights."""
    kept, response, terms, count = readings.kept, readings.rows.response, readings.terms, len(given)
    low, high = (sign * torch.where(kept, sign * given, torch.inf).amin(1) for sign in (1, -1))
    varies, pull = bool((low < high).any()), terms.parts[1] * terms.mask[1]
    level = torch.ones_like(low) if varies else torch.where(kept.any(1), low, 0.0)
    sums = [unit, *([unit * readings.J.kept(given)] if varies else []), *([pull] if pull.any() else [])]
    inner = readings.J.gram(torch.stack(sums).float(), groups=torch.arange(count)).products
    inner = inner.reshape(count * len(sums), count * len(sums))
    with_T = np.stack([np.bincount(response, own.numpy() * along, minlength=count) for own in sums], 1).flatten()
    ones = readings.aggregate(replace(terms, parts=torch.ones_like(terms.parts)).scale(1, 0, 0))
    for name, (place, value, part) in product(aggregations, _parts(readings)):
        each = torch.zeros(count, dtype=torch.float64)
        each[response[terms.kept]] = ones[name][0, terms.kept]  # one number in a response
        inside = each[:, None] * torch.nn.functional.one_hot(part)
        wide = torch.zeros(count, len(sums), 1 + 2 * inside.shape[1], dtype=torch.float64)
        shift, scale = wide[:, :, 1:].chunk(2, 2)
        shift[:, 0], scale[:, int(varies)] = inside, inside * level[:, None]
        wide[:, -1, 0] = each * pull.any()
        into = wide.flatten(0, 1).numpy()
        K, b = into.T @ inner @ into, into.T @ with_T
        x = np.append(1.0, np.linalg.lstsq(K[1:, 1:], (b - K[:, 0])[1:], rcond=1e-9)[0])
        left = (max(0.0, square - 2 * b @ x + x @ K @ x) / square) ** 0.5
        shift, scale = torch.from_numpy(x[1:]).view(2, -1)
        new = torch.where(kept, scale[part][:, None] * given + shift[part][:, None], 0.0)
        if _tells(given, new, kept, part, shift, scale):
            reading = Reading(name, (f"advantages-whitened-in-{place}",), value=value)
            yield _Fit(left > CLOSE, inside.shape[1], left, reading, new)


def _tells(
    given: Float[Tensor, "B S"],
    new: Float[Tensor, "B S"],
    kept: Bool[Tensor, "B S"],
    part: Int[Tensor, " B"],
    shift: Float[Tensor, " P"],
    scale: Float[Tensor, " P"],
) -> bool:
    """Return whether advantages are shifted, and have more values in the parts that change than numbers were fitted."""
    moved = (new - given).abs().amax(1) > EQUAL * given.abs().max()
    changed = part[moved].unique()
    counts = [len(given[kept & (part == own)[:, None]].float().unique()) for own in changed]
    shifted = (shift[changed].abs() > EQUAL * new.abs().max()).any() and (scale[changed] > 0).all()
    return sum(max(0, own - 2) for own in counts) >= BEYOND and bool(shifted)
