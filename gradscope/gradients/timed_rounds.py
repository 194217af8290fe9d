"""A token table within minutes: rounds of measuring, each as large as the seconds of those before it say.

A first round of PILOT tokens of each interval tells how many seconds a unit of cost takes; a unit is a position that a
backward pass carries for a token, and a sequence's forward pass, head and factors count for as many as in
`engine.chunks`. Each further round takes at most the part STEP of the time that is left and measures at most GROWTH
times as many as before, so that an estimate that is far off is mended by the next; there is none when less than the
part ENOUGH of the seconds for measuring is left. The sample of a round holds those before it (`sample`): nothing is
measured twice, and nothing that was measured is dropped.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, runtime_checkable

import pandas as pd

from gradscope.gradients.sample import TokenSample
from gradscope.gradients.settings import MeasureSettings
from gradscope.runs import Processes

PILOT = 2
"""Tokens of each interval in the first round, which is measured even when time is up."""
STEP = 2 / 3
GROWTH = 8
ENOUGH = 0.15


@dataclass(frozen=True)
class Round:
    """Tokens measured in one go."""

    each: int
    """Measured tokens of each interval after this round."""
    seconds: float
    spent: float
    """Seconds from the beginning of the first run to the end of the round."""
    norms: pd.DataFrame
    """`TableMeasurement.measure_more` of all processes, by the place of the token in the table."""

    def to_part(self) -> pd.DataFrame:
        """Return the round as one DataFrame, to be written to a file."""
        told = {"each": self.each, "seconds": self.seconds, "spent": self.spent}
        return self.norms.rename_axis("place").reset_index().assign(**told)

    @classmethod
    def of_part(cls, part: pd.DataFrame) -> Round:
        """Read the round back from what `to_part` returned."""
        each, seconds, spent = (part[name].iloc[0] for name in ("each", "seconds", "spent"))
        norms = part.set_index("place").drop(columns=["each", "seconds", "spent"])
        return cls(int(each), float(seconds), float(spent), norms)


class Stopwatch:
    """Counts seconds since it was made, on top of those of earlier runs of the same measurement."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._start = clock, clock()
        self.earlier = 0.0

    def seconds(self) -> float:
        return self.earlier + self._clock() - self._start


def describe_seconds(seconds: float) -> str:
    """Format seconds in a readable unit.

    >>> describe_seconds(42.0), describe_seconds(7200.0)
    ('42 s', '2 h')
    """
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.2g} s"


@runtime_checkable
class GrowingMeasurement(Protocol):
    """The part of an entered `TableMeasurement` that rounds need."""

    settings: MeasureSettings
    processes: Processes
    sample: TokenSample
    reserve: float

    def measure_more(self, previous: int, each: int) -> pd.DataFrame: ...

    def cost_of_more(self, previous: int, each: int) -> float: ...

    def tabulate(self, norms: pd.DataFrame, each: int) -> Iterator[pd.DataFrame]: ...


def measure_rounds(
    measurement: GrowingMeasurement,
    watch: Stopwatch,
    finished: Sequence[Round] = (),
) -> Iterator[Round]:
    """Yield the rounds after the finished ones, as they come; all processes iterate together.

    watch: started with the measurement; the main process's counts.
    """
    processes, rounds = measurement.processes, list(finished)
    while True:
        with processes.together():
            seconds = watch.seconds() + measurement.reserve
            mine = [_next_size(measurement, rounds, seconds)] if processes.is_main else []
        each = processes.gather(mine)[0]
        if each is None:
            return
        start, previous = watch.seconds(), rounds[-1].each if rounds else 0
        with processes.together():
            norms = measurement.measure_more(previous, each)
        norms = pd.concat(processes.gather([norms])).sort_index()
        now = watch.seconds()
        rounds.append(Round(each, now - start, now, norms))
        yield rounds[-1]


def join_rounds(measurement: GrowingMeasurement, rounds: Sequence[Round]) -> Iterator[pd.DataFrame]:
    """Yield the table of all rounds, a DataFrame per response."""
    return measurement.tabulate(pd.concat([done.norms for done in rounds]), rounds[-1].each)


def _next_size(measurement: GrowingMeasurement, rounds: Sequence[Round], seconds: float) -> int | None:
    """Return the tokens of each interval after the next round, or None if there is none. seconds: elapsed."""
    largest, total = measurement.sample.largest, 60 * measurement.settings.minutes
    if not rounds:
        return min(PILOT, largest)
    sizes = [0, *(done.each for done in rounds)]
    previous, left = sizes[-1], total - seconds
    if previous >= largest or left < ENOUGH * (left + sum(done.seconds for done in rounds)):
        return None
    cost = sum(measurement.cost_of_more(*ends) for ends in pairwise(sizes))
    rate = sum(done.seconds for done in rounds) / cost
    for room in (STEP * left, left):
        candidates = range(previous + 1, min(GROWTH * previous, largest) + 1)
        fitting = bisect_right(candidates, room, key=lambda each: rate * measurement.cost_of_more(previous, each))
        if fitting:
            return candidates[fitting - 1]
    return None
