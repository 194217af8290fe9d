"""Tensors too large for memory, in an unlinked file whose pages the system writes out when it needs memory.

Such a tensor is read and written like any other, on the CPU; its pages are page cache, not process memory.
The file is unlinked at once, so nothing is left behind however the process ends.
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
"""Bytes below which memory is used instead."""


def scratch_zeros(*shape: int, dtype: torch.dtype) -> Tensor:
    """Allocate zeros [*shape] in a file in TMPDIR, or in memory if small.

    Disk space is reserved at once: a full disk raises InputError now, instead of killing the process later.
    """
    count = math.prod(shape)
    size = count * dtype.itemsize
    if size <= SMALL:
        return torch.zeros(shape, dtype=dtype)
    check_room(size)
    handle, name = tempfile.mkstemp(prefix="gradscope-", dir=_folder())
    try:
        with suppress(AttributeError):  # not available on every system
            os.posix_fallocate(handle, 0, size)
        return torch.from_file(name, shared=True, size=count, dtype=dtype).view(shape)
    except OSError as error:
        raise _too_little(size, 0) from error
    finally:
        os.close(handle)
        os.unlink(name)


def check_room(size: int) -> None:
    """Raise InputError unless this many bytes are free for scratch files."""
    free = shutil.disk_usage(_folder()).free
    if size > free:
        raise _too_little(size, free)


def _too_little(size: int, free: int) -> InputError:
    return InputError(
        f"{size / 1e9:.3g} GB of scratch files are needed, but {_folder()} has {free / 1e9:.3g} GB free; set TMPDIR to "
        "a folder with more room, or allow more memory (--gradient-memory)"
    )


def _folder() -> str:
    """Return TMPDIR or else /var/tmp, since /tmp may be in memory."""
    return os.environ.get("TMPDIR") or ("/var/tmp" if os.access("/var/tmp", os.W_OK) else tempfile.gettempdir())
