"""The exact gradients of readings beside the trainer's: first of those without a fault, then of faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from gradscope.gradients import TokenJacobian, Vectors
from gradscope.policy import arithmetic_dtype
from gradscope.updates.auditing.products import products_of
from gradscope.updates.auditing.readings import FAULTS, Reading, Readings

NORMED = ("mask-late", "mask-early")
AT_ONCE = 8
"""Readings whose gradients are held at a time."""
MISSES, TRIED = 0.02, 2
"""Largest relative error of ‖theirs‖² if a part is missing, and how many parts are tried: the gradient without a part
then decides."""


class Search:
    """Inner products, by parameter, of the trainer's gradient with the exact ones of the readings tried so far."""

    def __init__(
        self, readings: Readings, theirs: Mapping[str, Float[Tensor, " p"]] | None, trained: Callable[[str], bool]
    ) -> None:
        """theirs: flat, by parameter; None: unknown. trained: whether a parameter is, if theirs does not tell."""
        self.readings, self._theirs, self._trained = readings, theirs, trained
        self.found: dict[Reading, pd.DataFrame] = {}
        """By reading, see `products_of`."""
        self._weights: dict[Reading, Float[Tensor, " K"]] = {}
        """Of the readings whose gradient is of the batch's own log π."""
        self._try(readings.plain())

    def distinct(self, first: str) -> list[str]:
        """Return the aggregations that differ on this batch, `first` in front; by another name than the log's."""
        plain, kept = [reading for reading in self._weights if reading.fault is None], []
        named = sorted(plain, key=lambda reading: reading.aggregation == "logged")
        for reading in named:
            if not any(self._same(reading, self._weights[other]) for other in kept):
                kept.append(reading)
        like = [self._same(Reading(first), self._weights[reading]) for reading in kept]
        order = sorted(range(len(kept)), key=lambda place: not like[place])
        return [kept[place].aggregation for place in order]

    def try_faults(self, aggregation: str) -> None:
        """Try an aggregation's faults; for a norm alone, which many would have by chance, only NORMED."""
        readings, batch = self.readings, self.readings.J.batch
        plain = [reading for reading in self._weights if reading.fault is None]
        wanted = FAULTS if self._theirs is not None else NORMED
        faulty = {r: w for r, w in readings.faulty(aggregation) if w.any() and r.fault in wanted}
        self._try({r: w for r, w in faulty.items() if not any(_near(w, self._weights[other]) for other in plain)})
        if (batch.temperature[batch.response_mask.any(1)] != 1).any():
            unscaled = TokenJacobian(readings.J.policy, batch.at_temperature(1.0), readings.J.resources)
            weights = readings.at_temperature_1(unscaled, aggregation)
            self._multiply({Reading(aggregation, "no-temperature"): weights}, unscaled)
        if self._theirs is not None and arithmetic_dtype(readings.J.model).itemsize >= 4:  # else there is no jvp
            self._try(dict(self._missing(aggregation)))

    def _same(self, reading: Reading, weights: Float[Tensor, " K"]) -> bool:
        return _near(weights, self._weights[reading])

    def _try(self, weights: Mapping[Reading, Float[Tensor, " K"]]) -> None:
        """Try readings; those with the weights of one that was tried have its products."""
        new: dict[Reading, Float[Tensor, " K"]] = {}
        twins: dict[Reading, Reading] = {}
        for reading, own in weights.items():
            known = self._weights | new
            if (twin := next((other for other, its in known.items() if _near(own, its)), None)) is not None:
                twins[reading] = twin
            else:
                new[reading] = own
        self._multiply(new, self.readings.J)
        self.found |= {reading: self.found[twin] for reading, twin in twins.items()}
        self.found |= {reading: self.found.pop(reading) for reading in weights}  # in the given order
        self._weights |= weights

    def _multiply(self, weights: Mapping[Reading, Float[Tensor, " K"]], J: TokenJacobian) -> None:
        names = [*weights]
        for start in range(0, len(names), AT_ONCE):
            some = names[start : start + AT_ONCE]
            vectors = J.vjp(-torch.stack([weights[reading] for reading in some]).float())
            for row, reading in enumerate(some):
                ours = {name: vectors.rows[row, part] for name, part in vectors.slices.items() if self._looks_at(name)}
                self.found[reading] = products_of(ours, self._theirs)

    def _looks_at(self, name: str) -> bool:
        return self._trained(name) if self._theirs is None else name in self._theirs

    def _missing(self, aggregation: str) -> Iterator[tuple[Reading, Float[Tensor, " K"]]]:
        """Yield the readings without the part that most likely is missing.

        If theirs = f·(ours − o) with o the part's gradient, then ⟨ours, theirs⟩ gives f, ⟨o, theirs⟩ gives ‖o‖², and
        these give ‖theirs‖². ⟨o, v⟩ is Σ over the part's tokens of −weight·⟨∇ log π_t, v⟩, of every part from one jvp.
        """
        J, weights = self.readings.J, self._weights[Reading(aggregation)]
        products = self.found[Reading(aggregation)]
        square, cross, other = (float(products[name].sum()) for name in ("own", "cross", "other"))
        vectors = Vectors.zeros(J.model, 2, J.resources.vectors)
        ours = J.vjp(-weights[None].float())
        for name, part in vectors.slices.items():
            if name in self._theirs:
                vectors.rows[0, part], vectors.rows[1, part] = self._theirs[name], ours.rows[0, part]
        along = -weights * J.jvp(vectors).logprob.double().cpu()
        for fault, part in self.readings.parts().items():
            with_theirs, with_ours = (np.bincount(part.numpy(), own.numpy()) for own in along)
            with np.errstate(divide="ignore", invalid="ignore"):
                factor = cross / (square - with_ours)
                own = with_ours - with_theirs / factor
                error = np.abs(factor**2 * (square - 2 * with_ours + own) / other - 1)
            error = np.where((factor > 0) & (own > 0), error, np.inf)
            for index in np.argsort(error)[:TRIED]:
                if error[index] <= MISSES:
                    yield Reading(aggregation, fault, int(index)), weights * (part != int(index))


def _near(a: Float[Tensor, " K"], b: Float[Tensor, " K"]) -> bool:
    """Return whether two readings have the same weights, to rounding."""
    return bool((a - b).norm() <= 1e-5 * b.norm())
