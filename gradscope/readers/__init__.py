"""Rollout files of any trainer become a TokenBatch: one file here per format, registered by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from gradscope.batch import TokenBatch
from gradscope.errors import InputError
from gradscope.models import Policy
from gradscope.readers.native import read_native, write_rollouts

READERS: dict[str, Callable[[Path, Policy | None], TokenBatch]] = {"native": read_native}
"""What reads a format, by its name; a reader of your own is one more entry."""

__all__ = ["READERS", "read_rollouts", "write_rollouts"]


def read_rollouts(path: str | Path, policy: Policy | None = None, *, format: str | None = None) -> TokenBatch:
    """Read the responses of one file.

    policy: whose tokenizer encodes rows of text, and whose vocabulary and context bound the ids; without one, rows
        must hold ids and their size is not checked.
    format: a name in READERS; None is "native" (JSONL or parquet; columns in gradscope.readers.native).

    Raises InputError, naming file and row, for anything that cannot be used.
    """
    reader = READERS.get("native" if format is None else format)
    if reader is None:
        raise InputError(f"rollout format {format!r} is not known; use one of {', '.join(sorted(READERS))}")
    return reader(Path(path), policy)
