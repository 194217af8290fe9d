"""Checkpoints that a crash, a full disk or another program has damaged."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from gradscope.errors import InputError


@contextmanager
def reading(checkpoint: Path) -> Iterator[None]:
    """Whatever fails in this block, but for want of memory, is this checkpoint's fault: an InputError that says so."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # what a damaged pickle raises is anything
        words = re.split(r"\n|[.;] ", str(error))[0]
        cause = words if isinstance(error, InputError) else f"{type(error).__name__}: {words}".removesuffix(": ")
        raise InputError(
            f"checkpoint {checkpoint} is damaged ({cause}); delete it to go on from the one before, or from the start"
        ) from error
