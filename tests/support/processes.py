"""Commands in processes of their own, forked from one that has imported what takes seconds."""

from __future__ import annotations

import gc
import os
import runpy
import secrets
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gradscope.runs import worker_context

TIMEOUT = 900
"""Seconds after which processes count as hanging; on two idle cores they take ten to twenty, on busy ones minutes."""


@dataclass(frozen=True)
class Ended:
    """How a process ended."""

    status: int
    stdout: str
    stderr: str


class Command:
    """`python ARGUMENTS` (-m MODULE, -c CODE or a file), with this process's environment and what is given."""

    def __init__(self, *arguments: object, **environment: str):
        self._folder = tempfile.TemporaryDirectory()
        given = (self._folder.name, [str(argument) for argument in arguments], os.environ | environment)
        self._process = worker_context().Process(target=_become, args=given)
        self._process.start()

    def wait(self, timeout: float = TIMEOUT) -> Ended:
        """Wait for its end, and kill it where it takes longer."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
        files = [Path(self._folder.name, name) for name in ("out", "err")]
        said = [file.read_text() if file.exists() else "" for file in files]
        self._folder.cleanup()
        return Ended(self._process.exitcode, *said)

    def kill_after(self, seconds: float) -> Ended:
        """`kill -9` after so many seconds, unless it has ended by then."""
        self._process.join(seconds)
        self._process.kill()
        return self.wait()

    def kill_when(self, reached: Callable[[], bool], timeout: float = 120) -> Ended:
        """`kill -9` as soon as something is so."""
        end = time.monotonic() + timeout
        while self._process.is_alive() and time.monotonic() < end and not reached():
            time.sleep(0.005)
        self._process.kill()
        ended = self.wait()
        assert ended.status == -signal.SIGKILL, ended.stderr
        return ended


def _become(folder: str, arguments: list[str], environment: dict[str, str]) -> None:
    """In the child: be that command."""
    gc.freeze()  # no garbage collection looks through what the child was forked with
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # TMPDIR is looked at anew
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(Path(folder, name), os.O_CREAT | os.O_WRONLY), number)
    first, *rest = arguments
    sys.argv = [first, *rest] if first not in ("-m", "-c") else rest
    if first == "-m":
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        runpy.run_path(first, run_name="__main__")


def launch(*command: object, count: int = 2, timeout: float = TIMEOUT) -> list[Ended]:
    """Run a command in that many processes at once, with the environment that torchrun gives them."""
    shared = {"WORLD_SIZE": str(count), "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    started = [Command(*command, **shared, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(count)]
    return [process.wait(timeout) for process in started]


def free_port() -> int:
    """Below those that Linux gives to outgoing connections, lest one takes it before it is listened on."""
    while True:
        port = 20_000 + secrets.randbelow(10_000)
        with suppress(OSError), socket.socket() as listener:
            listener.bind(("localhost", port))
            return port
