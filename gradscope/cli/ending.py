"""How a process ends: interrupted, unread, or launched with others."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO


@contextmanager
def noting_interruption() -> Iterator[list[int]]:
    """Yield a list that is filled when SIGINT comes: a library that is being loaded may make another error of it.

    The signal raises KeyboardInterrupt as ever; one that is ignored stays so.
    """
    noted: list[int] = []

    def note(number: int, frame: Any) -> None:
        noted.append(number)
        place = frame
        while place is not None and place.f_code.co_name != "__del__":
            place = place.f_back
        if place is None:
            signal.default_int_handler(number, frame)
        threading.Timer(0.01, os.kill, (os.getpid(), number)).start()  # what __del__ raises, Python prints and drops

    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before in (signal.SIG_IGN, None):
        yield noted
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)


def go_on_unread() -> None:
    """From here on, what is printed goes nowhere once nobody reads it (`| head`); the work goes on to its end."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and stream is getattr(sys, f"__{name}__"):
            setattr(sys, name, _Unread(stream))


class _Unread:
    """A stream whose reader may go."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        return self._try(self._stream.write, text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, call: Callable[..., Any], *args: str) -> Any:
        try:
            return call(*args)
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
            return call(*args)  # with what was held back


def end_at_once(call: Callable[[], None]) -> None:
    """Call it and, in one of several processes, end with its status before Python takes itself apart.

    Threads of torch's process group may still free a tensor of the last exchange, which aborts a Python that ends
    meanwhile. A process that was not launched with others ends as ever.
    """
    if "WORLD_SIZE" not in os.environ:
        call()
        return
    try:
        call()
        status = 0
    except SystemExit as ended:
        status = ended.code or 0
    atexit._run_exitfuncs()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.flush()
    os._exit(status)
