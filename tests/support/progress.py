"""Who listens to the stages of long work and remembers them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from gradscope.runs import Advance, Progress


@dataclass
class Heard:
    """One stage."""

    name: str
    total: float | None
    done: float
    within: tuple[str, ...]


@dataclass
class Listener(Progress):
    """Prints nothing."""

    stages: list[Heard] = field(default_factory=list)
    """In the order of their begins."""
    costs: dict[str, float] = field(default_factory=dict)
    _running: list[str] = field(default_factory=list)

    def plan(self, costs: Mapping[str, float]) -> None:
        self.costs = dict(costs)

    @contextmanager
    def stage(self, name: str, total: float | None = None, unit: str = "", *, done: float = 0) -> Iterator[Advance]:
        heard = Heard(name, total, done, tuple(self._running))
        self.stages.append(heard)
        self._running.append(name)

        def advance(amount: float, words: str = "") -> None:
            heard.done += amount

        yield advance
        self._running.remove(name)

    @property
    def names(self) -> set[str]:
        return {stage.name for stage in self.stages}

    @property
    def unfinished(self) -> list[Heard]:
        """Stages that were not told of all that they had to do."""
        return [stage for stage in self.stages if stage.total is not None and stage.done != stage.total]
