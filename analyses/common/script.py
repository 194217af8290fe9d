"""Command lines of the scripts: common options of those that draw, and one-line errors for bad input."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from analyses.common.places import place
from gradscope.errors import InputError

MAIN_SCALE = "cpu"
"""The scale whose pictures and tables are not named after it."""
COMPLAINT = "error: "
"""Prefix of an error's line."""


@dataclass(frozen=True)
class Output:
    out: Path = Path("figures")
    """Folder of all pictures and tables; analyses/common/places.py says where each stands below."""

    def at(self, name: str) -> Path:
        """Return the path of a picture or table."""
        return place(self.out, name)


@dataclass(frozen=True)
class Options(Output):
    scale: str = MAIN_SCALE
    """The scale of analyses/runs.toml whose runs are drawn."""

    def at(self, name: str) -> Path:
        """Return the path of a picture or table, which names the scale unless it is the main one."""
        return super().at(name if self.scale == MAIN_SCALE else f"{self.scale}/{name}")


@dataclass(frozen=True)
class WordsOptions(Options):
    scale: str = "words"


def exit_with(call: Callable[[], int | None]) -> None:
    """Exit with `call`'s status (None: 0), or with 2 and the error's line if the input or a file is at fault.

    A file that cannot be written is such a fault, for example below an `--out` that is not a folder. Interruption gives
    130.
    """
    try:
        status = call()
    except KeyboardInterrupt:
        print(f"{COMPLAINT}interrupted; what is finished stays", file=sys.stderr)
        status = 130
    except (InputError, OSError) as error:
        print(f"{COMPLAINT}{error}", file=sys.stderr)
        status = 2
    sys.exit(status)


def end_with(parent: int) -> None:
    """From now on, end this process when the process with this number is gone, even by kill -9.

    Otherwise it would live on and hold its run's lock.
    """
    threading.Thread(target=_wait_for_the_end, args=(parent,), daemon=True).start()


def _wait_for_the_end(parent: int) -> None:
    while _is_alive(parent):
        time.sleep(1.0)
    os._exit(1)


def _is_alive(process: int) -> bool:
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
