"""How the scripts are called: the options of those that draw, and one line where the input is at fault."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from gradscope.cli import go_on_unread, noting_interruption
from gradscope.errors import InputError

COMPLAINT = "error: "
"""Before the line that says what is at fault."""


@dataclass(frozen=True)
class Options:
    """Settings of the script."""

    out: Path = Path("figures")
    """Folder of pictures and tables."""
    scale: str = "cpu"
    """The scale of analyses/runs.toml whose runs are drawn."""


def exit_with(call: Callable[[], int | None]) -> None:
    """Exit with the status that `call` returns (None: 0); where the input or a file is at fault, with 2 and its line.

    A file is at fault that cannot be written, such as below an `--out` that is no folder. Whoever has read enough of
    what is printed (`head`) is no fault, and hears nothing. Nor is who interrupts: 130.
    """
    go_on_unread()
    with noting_interruption() as interrupted:
        try:
            status = call()
            if sys.stdout is not None:  # closed by the shell
                sys.stdout.flush()
        except (Exception, KeyboardInterrupt) as error:
            if interrupted or isinstance(error, KeyboardInterrupt):
                print(f"{COMPLAINT}interrupted; what is finished stays", file=sys.stderr)
                status = 130
            elif isinstance(error, InputError | OSError):
                print(f"{COMPLAINT}{error}", file=sys.stderr)
                status = 2
            else:
                raise
    sys.exit(status)


def end_with(parent: int) -> None:
    """From now on, end this process at once when the process with this number is gone, even by kill -9.

    Nobody else would end it, and it would hold its run's lock.
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
