"""One run at a time in a folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gradscope.errors import InputError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


@contextmanager
def locked(out: Path, lock: str) -> Iterator[None]:
    """Hold `out` for one run by locking the file `lock` in it; folders that were made and stay empty go in the end.

    The system lets go of it however the process ends. Where nothing can be written or locked, nothing is held. Raises
    InputError where another run holds it.
    """
    path = out / lock
    made = [folder for folder in path.parents if not folder.exists()]
    handle = _hold(path, out)
    try:
        yield
    finally:
        if handle is not None:
            path.unlink(missing_ok=True)
            os.close(handle)
        with suppress(OSError):
            for folder in made:
                folder.rmdir()


def _hold(path: Path, out: Path) -> int | None:
    while fcntl is not None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError:  # whether this matters is said when something is to be written
            return None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(handle)
            if isinstance(error, BlockingIOError):
                raise InputError(f"another run is writing to {out}; wait for it, or give another --out") from error
            return None  # a disk without locks
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), path.stat()):
                return handle
        os.close(handle)  # of a run that has ended, and removed it, in this very moment
    return None
