"""Seconds that a measurement has taken, and in words."""

from __future__ import annotations

import time
from collections.abc import Callable

SLOWEST = 5.0
"""Most that the price of what follows grows by: waiting for a disk looks like waiting for a processor."""


class Stopwatch:
    """Counts seconds since its creation, plus those of earlier runs of the same measurement."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._start, self._computed = clock, clock(), time.process_time()
        self.earlier = 0.0

    def seconds(self) -> float:
        return self.earlier + self._clock() - self._start

    def slowness(self) -> float:
        """Return the seconds that pass while this process computes for one, 1 to SLOWEST: others use the processors."""
        computed = time.process_time() - self._computed
        return min(max(1.0, (self._clock() - self._start) / max(computed, 1e-9)), SLOWEST)


def describe_seconds(seconds: float) -> str:
    """Format seconds in a readable unit.

    >>> describe_seconds(42.0), describe_seconds(7200.0)
    ('42 s', '2 h')
    """
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.2g} s"
