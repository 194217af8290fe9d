"""One run at a time in a folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from gradscope.errors import InputError

MOMENT = 0.2
"""Seconds to wait for a run that is just ending."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder for one run by the file `.lock` in it, which the system releases however the process ends.

    Raises InputError where another run holds it. Where no lock can be had, nothing is held.
    """
    lock = FileLock(folder / ".lock", timeout=MOMENT)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout as error:
        raise InputError(f"another run is writing to {folder}; wait for it, or give another --out") from error
    except (OSError, NotImplementedError):
        pass  # no rights, or a disk without locks: whether this matters is said when something is to be written
    try:
        yield
    finally:
        if lock.is_locked:
            with suppress(OSError):
                (folder / ".lock").unlink()
        lock.release()
        with suppress(OSError):  # it is not empty
            folder.rmdir()
