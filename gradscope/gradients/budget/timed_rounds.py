"""A token table under a time limit: rounds of measuring, sized by the speed of earlier rounds.

If everything fits, one round measures it. Else a first round of PILOT tokens per interval finds the seconds per unit of
cost. A unit is one position that a backward pass carries for one token; a sequence's forward pass, head and factors
count as in `engine.grouping`. Each further round takes at most a fraction STEP of the remaining time and grows the
sample by at most a factor GROWTH, so that a bad estimate is corrected by the next round. There is no further round once
less than a fraction ENOUGH of the measuring time is left. Each sample contains the earlier ones (`sample`), so no token
is measured twice and none is dropped.
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
"""Tokens per interval in the first round, which is measured even if time is up."""
STEP = 2 / 3
GROWTH = 8
ENOUGH = 0.15


@dataclass(frozen=True)
class Round:
    """The tokens measured in one round."""

    each: int
    """Measured tokens per interval after this round."""
    seconds: float
    spent: float
    """Seconds from the start of the first run to the end of the round."""
    norms: pd.DataFrame
    """`TableMeasurement.measure_more` of all processes, indexed by the token's row in the table."""

    def to_part(self) -> pd.DataFrame:
        """Return the round as a DataFrame, for writing to a file."""
        told = {"each": self.each, "seconds": self.seconds, "spent": self.spent}
        return self.norms.rename_axis("place").reset_index().assign(**told)

    @classmethod
    def of_part(cls, part: pd.DataFrame) -> Round:
        """Restore a round from `to_part`."""
        each, seconds, spent = (part[name].iloc[0] for name in ("each", "seconds", "spent"))
        norms = part.set_index("place").drop(columns=["each", "seconds", "spent"])
        return cls(int(each), float(seconds), float(spent), norms)


class Stopwatch:
    """Counts seconds since its creation, plus those of earlier runs of the same measurement."""

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
    """The part of a `TableMeasurement` that rounds use."""

    settings: MeasureSettings
    processes: Processes
    sample: TokenSample
    reserve: float
    at_once: bool

    def measure_more(self, previous: int, each: int) -> pd.DataFrame: ...

    def cost_of_more(self, previous: int, each: int) -> float: ...

    def tabulate(self, norms: pd.DataFrame, each: int) -> Iterator[pd.DataFrame]: ...


def measure_rounds(
    measurement: GrowingMeasurement,
    watch: Stopwatch,
    finished: Sequence[Round] = (),
) -> Iterator[Round]:
    """Yield the rounds after the finished ones; all processes iterate together.

    watch: started with the measurement; only the main process's is used.
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
    """Yield the table from all rounds, a DataFrame per response."""
    return measurement.tabulate(pd.concat([done.norms for done in rounds]), rounds[-1].each)


def _next_size(measurement: GrowingMeasurement, rounds: Sequence[Round], seconds: float) -> int | None:
    """Return the tokens per interval after the next round; None to stop. seconds: elapsed."""
    largest, total = measurement.sample.largest, 60 * measurement.settings.minutes
    if not rounds:
        return largest if measurement.at_once else min(PILOT, largest)
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
