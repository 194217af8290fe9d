"""Run training loops in turns, a step each, in one process, and time the parts of their steps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch

Seconds = np.ndarray
"""CPU and wall seconds."""
REST = "rest"


class Turns:
    """Runs loops that call `pass_on` between their steps, so that they take turns of one step.

    Each loop has its own thread, and only one runs at a time, so the process's CPU time belongs to that loop. Loading
    and warm-up, before the first `pass_on`, do not count.
    """

    def __init__(self, loops: Mapping[str, Callable[[Callable[[], None]], None]]) -> None:
        """loops: {name: function}, each called with the function that passes the turn on."""
        self.loops, self.left = loops, list(loops)
        self.turn, self.changed = self.left[0], threading.Condition()
        self.steps: dict[str, list[dict[str, Seconds]]] = {name: [] for name in loops}
        """For each loop, the seconds of each counted step by part; parts add up to the step."""
        self._begun: set[str] = set()
        self._start()

    def run(self) -> dict[str, list[dict[str, Seconds]]]:
        """Return `steps` when all loops have ended; then re-raise the first error of a loop."""
        with ThreadPoolExecutor(len(self.loops)) as pool:
            for future in [pool.submit(self._run_loop, name) for name in self.loops]:
                future.result()
        return self.steps

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Attribute the time spent inside to this part of the step, and not to an enclosing one."""
        self._count()
        self._open.append(name)
        try:
            yield
        finally:
            self._count()
            self._open.pop()

    def _run_loop(self, name: str) -> None:
        torch.set_num_threads(1)  # a setting of each thread
        self._wait(name)
        try:
            self.loops[name](lambda: self._pass_on(name))
        finally:
            self._give_turn(name, leaves=True)

    def _pass_on(self, name: str) -> None:
        self._count()
        if name in self._begun:
            self.steps[name].append(self._parts)
        self._begun.add(name)
        self._give_turn(name)
        self._wait(name)
        self._start()

    def _give_turn(self, name: str, *, leaves: bool = False) -> None:
        with self.changed:
            self.turn = self.left[(self.left.index(name) + 1) % len(self.left)]
            if leaves:
                self.left.remove(name)
            self.changed.notify_all()

    def _wait(self, name: str) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.turn == name)

    def _start(self) -> None:
        self._parts: dict[str, Seconds] = {}
        self._open, self._since = [REST], read_clocks()

    def _count(self) -> None:
        now = read_clocks()
        self._parts[self._open[-1]] = self._parts.get(self._open[-1], 0.0) + now - self._since
        self._since = now


def read_clocks() -> Seconds:
    """Return CPU seconds of this process and wall seconds, from an arbitrary origin."""
    return np.array([time.process_time(), time.perf_counter()])


@contextmanager
def parts_of(turns: Turns, methods: Mapping[tuple[type, str], str | Callable[..., str]]) -> Iterator[None]:
    """Time each call of these methods as a part of its step; the part's name may depend on the arguments.

    methods: {(class, method name): part}.
    """

    def wrapped(original: Callable, part: str | Callable[..., str]) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            with turns.part(part if isinstance(part, str) else part(*args, **kwargs)):
                return original(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for (owner, name), part in methods.items():
            stack.enter_context(mock.patch.object(owner, name, wrapped(getattr(owner, name), part)))
        yield
