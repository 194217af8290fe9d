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

from gradscope.errors import InputError

COMPLAINT = "error: "
"""Prefix of an error's line."""


@dataclass(frozen=True)
class Options:
    out: Path = Path("figures")
    """Folder for pictures and tables."""
    scale: str = "cpu"
    """The scale of analyses/runs.toml whose runs are drawn."""


@dataclass(frozen=True)
class WordsOptions(Options):
    out: Path = Path("figures/words")
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
