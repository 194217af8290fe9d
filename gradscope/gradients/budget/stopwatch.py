"""Seconds that a measurement has taken, and in words."""

from __future__ import annotations

import time
from collections.abc import Callable


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
