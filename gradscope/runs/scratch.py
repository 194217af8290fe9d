"""Tensors too large for memory: in a file without a name, whose pages the system writes out when it needs the room.

Such a tensor is read and written like any other, on the CPU; its pages are page cache, not the process's own memory.
The file is unlinked before anything is written, so that nothing is left behind however the process ends.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from contextlib import suppress

import torch
from torch import Tensor

from gradscope.errors import InputError

SMALL = 1 << 20
"""Bytes below which a file is not worth it."""


def scratch_zeros(*shape: int, dtype: torch.dtype) -> Tensor:
    """Zeros [*shape] in a file of its own, in TMPDIR; small ones in memory.

    The room is taken at once: a full disk is an InputError now, where it would kill the process when a page is written.
    """
    count = math.prod(shape)
    size = count * dtype.itemsize
    if size <= SMALL:
        return torch.zeros(shape, dtype=dtype)
    check_room(size)
    handle, name = tempfile.mkstemp(prefix="gradscope-", dir=_folder())
    try:
        with suppress(AttributeError):  # of a system without it
            os.posix_fallocate(handle, 0, size)
        return torch.from_file(name, shared=True, size=count, dtype=dtype).view(shape)
    except OSError as error:
        raise _too_little(size, 0) from error
    finally:
        os.close(handle)
        os.unlink(name)


def check_room(size: int) -> None:
    """Raise InputError unless so many bytes are free for scratch files."""
    free = shutil.disk_usage(_folder()).free
    if size > free:
        raise _too_little(size, free)


def _too_little(size: int, free: int) -> InputError:
    return InputError(
        f"{size / 1e9:.3g} GB of scratch files are needed, and {_folder()} has {free / 1e9:.3g} GB free; let TMPDIR "
        "name a folder with room, or give more memory (--gradient-memory)"
    )


def _folder() -> str:
    """TMPDIR, else /var/tmp, which is on a disk where /tmp may lie in memory."""
    return os.environ.get("TMPDIR") or ("/var/tmp" if os.access("/var/tmp", os.W_OK) else tempfile.gettempdir())
