"""One run at a time in a folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from warnings import catch_warnings

from filelock import FileLock, Timeout

from gradscope.errors import InputError

MOMENT = 0.2
"""Seconds to wait for a run that is just ending and removes its lock."""


@contextmanager
def locked(out: Path, lock: str) -> Iterator[None]:
    """Hold `out` for one run by locking the file `lock` in it; folders made for it that stay empty are removed.

    The system releases the lock however the process ends. Where nothing can be written or locked, nothing is held.
    Raises InputError where another run holds it.
    """
    path = out / lock
    created = [folder for folder in path.parents if not folder.exists()]
    holder = FileLock(path, thread_local=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with catch_warnings(action="ignore", category=UserWarning):  # on a disk without flock, the file is the lock
            holder.acquire(timeout=MOMENT)
    except Timeout as error:
        raise InputError(f"another run is writing to {out}; wait for it, or give another --out") from error
    except (OSError, NotImplementedError):
        pass  # whether this matters is said when something is to be written
    try:
        yield
    finally:
        if holder.is_locked:
            path.unlink(missing_ok=True)
            holder.release()
        with suppress(OSError):
            for folder in created:
                folder.rmdir()
