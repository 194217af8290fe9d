"""In a process that writes: count its operations on the files of one folder, and disturb it at one of them.

What Python code opens there is written by a `FileIO` of ours, so that a byte is in its file when its operation is over.
Torch, safetensors and tokenizers write with code of their own: of the first two a whole file is one operation.
"""

from __future__ import annotations

import builtins
import errno
import io
import json
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, Literal

Way = Literal["kill before", "kill within", "kill after", "interrupt", "terminate", "pause", "full disk", "no rights"]
REFUSED = {"full disk": errno.ENOSPC, "no rights": errno.EACCES}
"""From that operation on, all fail so, until the process ends; root, too, whom no folder's mode refuses anything."""
SIGNALS = {"interrupt": signal.SIGINT, "terminate": signal.SIGTERM, "pause": signal.SIGSTOP}
"""Sent by the process to itself, before the operation."""
FREES = ("unlink", "rmdir", "replace", "rename", "ftruncate")
"""What a full disk allows."""
WRITES = ("write", "torch.save", "safetensors")
"""Operations that have a middle."""
_open = io.open


@dataclass
class Shim:
    """Stands between this process and a folder."""

    folder: Path
    way: Way | None = None
    """What happens at operation `at`, the first being 0; None: all are counted."""
    at: int = 0
    log: Path | None = None
    """Outside the folder: a line for each operation, [name, path]."""
    done: int = 0

    def install(self) -> None:
        """For the rest of this process's life."""
        import safetensors.torch
        import torch
        import transformers.modeling_utils

        builtins.open = io.open = self._open_file
        os.open = self._wrap("open", os.open, counts=lambda flags, *_, **__: flags & (os.O_WRONLY | os.O_RDWR))
        for name in ("mkdir", "rmdir", "unlink", "remove", "rename", "replace", "truncate", "fsync", "ftruncate"):
            setattr(os, name, self._wrap("unlink" if name == "remove" else name, getattr(os, name)))
        torch.save = self._wrap("torch.save", torch.save, place=1)
        saving = self._wrap("safetensors", safetensors.torch.save_file, place=1)
        safetensors.torch.save_file = transformers.modeling_utils.safe_save_file = saving

    def _wrap(
        self, name: str, call: Callable, *, place: int = 0, counts: Callable[..., object] = lambda *_, **__: True
    ) -> Callable:
        """The function as an operation; place: of the path among its arguments."""

        @wraps(call)
        def wrapped(*args: Any, **keywords: Any) -> Any:
            path = self._find(args[place], keywords.get("dir_fd")) if len(args) > place else None
            if path is None or not counts(*args[1:], **keywords):
                return call(*args, **keywords)
            return self.operate(name, path, lambda: call(*args, **keywords))

        return wrapped

    def _find(self, place: Any, folder: int | None) -> Path | None:
        """A path in the folder; None for any other."""
        try:
            if isinstance(place, int):
                place = os.readlink(f"/proc/self/fd/{place}")
            elif folder is not None:
                place = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), os.fsdecode(place))
            path = Path(os.path.abspath(os.fsdecode(place)))
        except (OSError, TypeError):
            return None
        return path if path.is_relative_to(self.folder) else None

    def _open_file(self, file: Any, mode: str = "r", buffering: int = -1, *args: Any, **keywords: Any) -> Any:
        path = None if isinstance(file, int) else self._find(file, None)
        if path is None or not set(mode) & set("wax+") or "opener" in keywords:
            return _open(file, mode, buffering, *args, **keywords)
        raw = self.operate("open", path, lambda: _File(path, mode.replace("t", "").replace("b", ""), shim=self))
        buffer = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        return buffer if "b" in mode else io.TextIOWrapper(buffer, *args, **keywords)

    def operate(self, name: str, path: Path, call: Callable[[], Any], half: Callable[[], Any] | None = None) -> Any:
        """One operation; half: what of it is done in its middle."""
        number, self.done = self.done, self.done + 1
        if self.log is not None:
            with _open(self.log, "a") as log:
                log.write(json.dumps([name, str(path.relative_to(self.folder))]) + "\n")
        if self.way in REFUSED and number >= self.at and not (self.way == "full disk" and name in FREES):
            code = REFUSED[self.way]
            raise OSError(code, os.strerror(code), *([] if name == "write" else [str(path)]))
        if number != self.at or self.way is None or self.way in REFUSED:
            return call()
        if self.way in SIGNALS:
            os.kill(os.getpid(), SIGNALS[self.way])
            return call()
        if self.way == "kill within" and half is not None:
            half()
        elif self.way != "kill before":
            call()
            if self.way == "kill within" and path.is_file():  # written by code that is not Python's
                os.truncate(path, path.stat().st_size // 2)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("killed")


class _File(io.FileIO):
    """A file whose every write is an operation."""

    def __init__(self, path: Path, mode: str, *, shim: Shim) -> None:
        super().__init__(path, mode)
        self._shim, self._path = shim, path

    def write(self, data: Any) -> int:
        data, write = memoryview(data).cast("B"), super().write
        return self._shim.operate("write", self._path, lambda: write(data), lambda: write(data[: len(data) // 2]))
