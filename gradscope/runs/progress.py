"""Progress of long computations by stage: a bar on a terminal, occasional lines in a file or pipe.

Long computations take a `Progress` and report their stages to it; nothing else draws bars.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Protocol, TypeVar

T = TypeVar("T")


class Advance(Protocol):
    """Callback that reports how much more of a stage is done, optionally with a remark."""

    def __call__(self, amount: int | float, words: str = "") -> None: ...


SWITCH = "GRADSCOPE_PROGRESS"
"""Environment variable; "off" silences every `Reporter`."""
EVERY = 30.0
"""Seconds between lines of the same stage."""
DELAY = 5.0
"""Seconds before a stage gets a line or bar."""
TICK = 0.5


class Progress:
    """To which stages report; this one is silent."""

    def stage(
        self, name: str, total: int | float | None = None, unit: str = "", *, done: int | float = 0
    ) -> AbstractContextManager[Advance]:
        """Open a stage, possibly nested. total: number of units (named in the plural); None: unknown. done: before."""
        return nullcontext(lambda amount, words="": None)

    def plan(self, costs: Mapping[str, float]) -> None:
        """Set the relative durations of stages by name, from now on."""


SILENT = Progress()


def settle_progress(progress: bool | Progress) -> Progress:
    """Return a Progress unchanged, a new `Reporter` for True, SILENT for False."""
    if isinstance(progress, bool):
        return Reporter() if progress else SILENT
    return progress


def track(
    items: Iterable[T], name: str, progress: bool | Progress, *, total: int | None = None, unit: str = ""
) -> Iterator[T]:
    """Iterate over items as a stage with one unit each."""
    total = len(items) if total is None and hasattr(items, "__len__") else total
    with settle_progress(progress).stage(name, total, unit) as advance:
        for item in items:
            yield item
            advance(1)


@dataclass(eq=False)
class _Stage:
    name: str
    total: int | float | None
    unit: str
    first: int | float
    """Units that were done before the stage began."""
    started: float
    done: int | float
    words: str = ""

    @property
    def share(self) -> float | None:
        return min(1.0, self.done / self.total) if self.total else None

    def counted(self) -> str:
        """Describe the stage: `sampling 12 of 64 responses`."""
        if self.total is None:
            return self.name
        words = f" ({self.words})" if self.words else ""
        return f"{self.name} {self.done:,.0f} of {max(self.done, self.total):,.0f} {self.unit}".rstrip() + words

    def left(self, now: float) -> float | None:
        """Return the seconds left, at the speed so far."""
        gained = self.done - self.first
        ahead = max(0, (self.total or 0) - self.done)  # a total may be an estimate
        return ahead * (now - self.started) / gained if self.total and gained > 0 else None


class Reporter(Progress):
    """Progress on stderr: a bar on a terminal, elsewhere a line at the start of each stage and every 30 s after.

    Stages shorter than DELAY seconds are not shown, nor is the start of a repeated stage. With a plan, percentage and
    time left are of all planned stages, otherwise of the outermost stage with a total.

    write: receives lines instead of stderr. clock: returns seconds. watched: check the clock from a thread; otherwise,
    the caller calls `tick`.
    """

    def __init__(
        self,
        *,
        write: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        watched: bool = True,
    ) -> None:
        self._write, self._clock, self._watched = write, clock, watched
        self._stages: list[_Stage] = []
        self._costs: dict[str, float] = {}
        self._past = self._best = 0.0
        self._planned = self._begun = clock()
        self._told: set[tuple[str, ...]] = set()
        self._said = self._begun
        self._drawn = False
        self._lock = threading.RLock()
        self._ended = threading.Event()

    def plan(self, costs: Mapping[str, float]) -> None:
        with self._lock:
            self._costs, self._past, self._best, self._planned = dict(costs), 0.0, 0.0, self._clock()

    @contextmanager
    def stage(
        self, name: str, total: int | float | None = None, unit: str = "", *, done: int | float = 0
    ) -> Iterator[Advance]:
        running = _Stage(name, total, unit, done, self._clock(), done)
        with self._lock:
            outermost = not self._stages
            self._stages.append(running)
        if outermost and self._watched and os.environ.get(SWITCH) != "off":
            self._ended = threading.Event()
            threading.Thread(target=self._watch, args=(self._ended,), daemon=True).start()

        def advance(amount: int | float, words: str = "") -> None:
            running.done, running.words = running.done + amount, words

        try:
            yield advance
        finally:
            with self._lock:
                self._stages.remove(running)
                if name in self._costs:
                    self._past, self._best = self._past + self._costs[name], 0.0
                if outermost:
                    self._ended.set()
                    self._erase()

    def tick(self) -> None:
        """Report progress, if it is time to."""
        with self._lock:
            if not self._stages:
                return
            now = self._clock()
            lasting = tuple(stage.name for stage in self._stages if now - stage.started >= DELAY)
            if self._write is None and _on_terminal():
                if lasting or self._drawn:
                    self._draw(now)
            elif now - self._said >= EVERY or (lasting and lasting not in self._told):
                # The line describes all running stages.
                self._told |= {lasting, tuple(stage.name for stage in self._stages)}
                self._said = now
                elapsed = int(now - self._begun)
                self._put(f"gradscope [{elapsed // 60}:{elapsed % 60:02}] {self._describe(now)}")

    def _describe(self, now: float) -> str:
        words = ": ".join(stage.counted() for stage in self._stages)
        share, left = self._share_and_left(now)
        if share is not None:
            words += f", {100 * share:.0f} %" + (" of all" if self._costs else "")
        return words if left is None else f"{words}, about {_in_words(left)} left"

    def _share_and_left(self, now: float) -> tuple[float | None, float | None]:
        part = next((place for place, stage in enumerate(self._stages) if stage.name in self._costs), None)
        if part is None:
            counted = next((stage for stage in self._stages if stage.total), None)
            return (None, None) if counted is None else (counted.share, counted.left(now))
        inner = next((stage.share for stage in self._stages[part:] if stage.share is not None), 0.0)
        self._best = max(self._best, inner)  # a stage may go through the batch several times
        total = sum(self._costs.values())
        share = min(1.0, (self._past + self._best * self._costs[self._stages[part].name]) / total)
        return share, (now - self._planned) * (1 - share) / share if share > 0 else None

    def _draw(self, now: float) -> None:
        share, _ = self._share_and_left(now)
        full = 0 if share is None else round(20 * share)
        bar = "" if share is None else f"|{'█' * full}{' ' * (20 - full)}| "
        line = (bar + self._describe(now))[: shutil.get_terminal_size().columns - 1]
        self._drawn = True
        self._put(f"\r{line}\x1b[K", end="")

    def _erase(self) -> None:
        if self._drawn:
            self._drawn = False
            self._put("\r\x1b[K", end="")

    def _put(self, text: str, end: str = "\n") -> None:
        if self._write is not None:
            self._write(text)
            return
        # A closed stderr must not stop the work; print would take file=None for stdout.
        with suppress(OSError, ValueError, AttributeError):
            sys.stderr.write(text + end)
            sys.stderr.flush()

    def _watch(self, ended: threading.Event) -> None:
        while not ended.wait(TICK):
            self.tick()


def _on_terminal() -> bool:
    """Return whether stderr is a terminal; False if it is closed or missing."""
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):
        return False


def _in_words(seconds: float) -> str:
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.{1 if unit == 'h' else 0}f} {unit}"
    return f"{seconds:.0f} s"
