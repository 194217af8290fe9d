"""One run at a time in a folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from warnings import catch_warnings

from filelock import FileLock, Timeout

from gradscope.errors import LESS_MEMORY, InputError

MOMENT = 0.2
"""Seconds to wait for a run that is just ending and removes its lock."""


@contextmanager
def locked(out: Path, lock: str) -> Iterator[None]:
    """Hold `out` for one run by locking the file `lock` in it; folders made for it that stay empty are removed.

    The system releases the lock however the process ends. Where nothing can be written or locked, nothing is held.
    Raises InputError where another run holds it. That the last run left its lock, because it was killed, is said on
    stderr: the system kills without a word whoever takes too much memory.
    """
    path = out / lock
    created = [folder for folder in path.parents if not folder.exists()]
    holder = FileLock(path, thread_local=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if _acquire(holder, path):
            words = f"the last run in {out} was killed; if that was for want of memory, {LESS_MEMORY}"
            print(f"note: {words}", file=sys.stderr)
    except Timeout as error:
        raise InputError(f"another run is writing to {out}; wait for it, or give another --out") from error
    except (OSError, NotImplementedError):
        pass  # whether this matters is said when something is to be written
    try:
        yield
    finally:
        with suppress(OSError):
            if holder.is_locked:
                path.unlink(missing_ok=True)
        holder.release()
        with suppress(OSError):
            for folder in created:
                folder.rmdir()


def _acquire(holder: FileLock, path: Path) -> bool:
    """Whether the lock's file had been left there; one that an ending run removes meanwhile was not."""
    with ExitStack() as stack, catch_warnings(action="ignore", category=UserWarning):
        left = None
        with suppress(OSError):
            left = os.fstat(stack.enter_context(path.open("rb")).fileno())
        holder.acquire(timeout=MOMENT)  # on a disk without flock, the file is the lock, and there is a warning
        return left is not None and os.path.samestat(left, path.stat())
