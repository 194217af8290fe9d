"""A lock that admits one run at a time to a folder."""

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
    """Lock the folder with its file `.lock`, which the system releases however the process ends.

    Raises InputError if another run holds the lock. If locking is impossible, it does nothing.
    """
    lock = FileLock(folder / ".lock", timeout=MOMENT)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout as error:
        raise InputError(f"another run is writing to {folder}; wait for it, or give another --out") from error
    except (OSError, NotImplementedError):
        pass  # no permission, or no locks on this disk: a later write will report what matters
    try:
        yield
    finally:
        if lock.is_locked:
            with suppress(OSError):
                (folder / ".lock").unlink()
        lock.release()
        with suppress(OSError):  # not empty
            folder.rmdir()
