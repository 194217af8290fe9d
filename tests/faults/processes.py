"""A command in a process forked from this one, which has imported all that it needs, disturbed or not."""

from __future__ import annotations

import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.faults import work
from tests.faults.shim import Shim

PATIENCE = 900
"""Seconds after which a command counts as hanging."""


@dataclass(frozen=True)
class Ended:
    """How a process ended."""

    status: int
    """Exit status, or minus the signal."""
    stderr: str
    seconds: float


class Started:
    """A command that is running."""

    def __init__(
        self,
        command: str,
        inputs: Path,
        place: Path,
        *changes: str,
        shim: Shim | None = None,
        size_limit: int | None = None,
        modules: Path | None = None,
    ) -> None:
        """Its results go to place/out. size_limit: bytes of a file; modules: where it lists what it imported."""
        place.mkdir(parents=True, exist_ok=True)
        self.begun, self._said = time.monotonic(), tempfile.TemporaryFile()  # noqa: SIM115
        self._code: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                self._become(shim, size_limit)
                work.run(command, inputs, place / "out", *changes)
                status = 0
            except SystemExit as stop:
                status = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                if modules is not None:
                    modules.write_text("\n".join(sys.modules))
                os._exit(status)

    def _become(self, shim: Shim | None, size_limit: int | None) -> None:
        """In the child: as if it had been started by itself."""
        import numpy as np
        import torch

        os.setsid()
        nowhere = os.open(os.devnull, os.O_RDWR)
        for number, to in enumerate((nowhere, nowhere, self._said.fileno())):
            os.dup2(to, number)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        seed = int.from_bytes(os.urandom(4), "little")
        random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
        if size_limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size_limit, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        if shim is not None:
            shim.install()

    def send(self, number: signal.Signals, *, workers: bool = False) -> None:
        (os.killpg if workers else os.kill)(self.pid, number)

    def has_paused(self) -> bool:
        """Wait until it or a worker has stopped itself; False: it has ended instead."""
        while not self._has_ended():
            if any(worker.status() == psutil.STATUS_STOPPED for worker in self._alive()):
                return True
            time.sleep(0.01)
        return False

    def wait(self) -> Ended:
        """Wait for its end, and for that of its workers, which see by themselves that it is gone."""
        while not self._has_ended():
            time.sleep(0.003)
        seconds = time.monotonic() - self.begun
        while any(self._alive()) and time.monotonic() < self.begun + PATIENCE:
            time.sleep(0.05)
        self._said.seek(0)
        with self._said:
            return Ended(os.waitstatus_to_exitcode(self._code), self._said.read().decode(errors="replace"), seconds)

    def _has_ended(self) -> bool:
        if self._code is None:
            found, code = os.waitpid(self.pid, os.WNOHANG)
            if found:
                self._code = code
            elif time.monotonic() > self.begun + PATIENCE:
                self.send(signal.SIGKILL, workers=True)
        return self._code is not None

    def _alive(self) -> Iterator[psutil.Process]:
        """Processes of its session."""
        for process in psutil.process_iter():
            with suppress(OSError, psutil.Error):
                if os.getsid(process.pid) == self.pid and process.status() != psutil.STATUS_ZOMBIE:
                    yield process
