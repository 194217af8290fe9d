"""Tensors too large for memory: in a file without a name, whose pages the system writes out when it needs the room.

Such a tensor is read and written like any other, on the CPU; its pages are page cache, not the process's own memory.
The file is unlinked before anything is written, so that nothing is left behind however the process ends.
"""

from __future__ import annotations

import errno
import math
import os
import shutil
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from gradscope.errors import InputError

SMALL = 1 << 20
"""Bytes below which a file is not worth it."""


def scratch_zeros(*shape: int, dtype: torch.dtype) -> Tensor:
    """Zeros [*shape] in a file of its own, in the first of TMPDIR (/tmp), /var/tmp and . that is on a disk.

    What is small lies in memory after all. The room is taken at once. Raises InputError, in one line, where there is
    too little.
    """
    count = math.prod(shape)
    size = count * dtype.itemsize
    if size <= SMALL:
        return torch.zeros(shape, dtype=dtype)
    folder = scratch_folder()
    check_room(size, folder)
    handle, name = tempfile.mkstemp(prefix="gradscope-", dir=folder)
    try:
        _reserve(handle, size, folder)
        return torch.from_file(name, shared=True, size=count, dtype=dtype).view(shape)
    finally:
        os.close(handle)
        os.unlink(name)


def scratch_folder() -> Path:
    """Where scratch files go: not where files are memory themselves, as /tmp is on some machines."""
    folders = [Path(tempfile.gettempdir()), Path("/var/tmp"), Path()]
    usable = [folder for folder in folders if folder.is_dir() and os.access(folder, os.W_OK)]
    return next((folder for folder in usable if not _is_memory(folder)), usable[0])


def check_room(size: int, folder: Path | None = None) -> None:
    """Raise InputError unless so many bytes are free for scratch files."""
    folder = folder or scratch_folder()
    free = shutil.disk_usage(folder).free
    if size > free:
        raise InputError(
            f"{size / 1e9:.3g} GB of scratch files are needed, and {folder} has {free / 1e9:.3g} GB free; let TMPDIR "
            "name a folder with room, or give more memory (--gradient-memory)"
        )


def _reserve(handle: int, size: int, folder: Path) -> None:
    """Take the file's blocks: a full disk must be an error now, not a crash when a page is written."""
    try:
        os.posix_fallocate(handle, 0, size)
    except AttributeError:  # not on this system
        return
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise InputError(f"{size / 1e9:.3g} GB of scratch files do not fit into {folder} ({error})") from error


def _is_memory(folder: Path) -> bool:
    """Whether files in this folder are kept in memory alone."""
    try:
        mounts = dict(line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines())
    except OSError:  # not on this system
        return False
    path = folder.resolve()
    home = next((str(place) for place in (path, *path.parents) if str(place) in mounts), "")
    return mounts.get(home) in ("tmpfs", "ramfs")
