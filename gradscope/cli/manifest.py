"""Rollouts in a manifest, and runs whose rollouts an earlier version read differently."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from gradscope.errors import InputError
from gradscope.gradients import describe_reread
from gradscope.rollouts import READER, Dump
from gradscope.runs import RunFolder


def describe_dump(path: Path, dump: Dump, sha256: str) -> dict[str, Any]:
    """Describe rollouts for a manifest: file, hash, format and notes."""
    step = "; ".join(note for note in dump.notes if note.kind in ("step", "other-step", "pooled")) or None
    other = any(note.kind == "other-step" for note in dump.notes)
    told = {"path": str(path), "sha256": sha256, "format": dump.format, "reader": READER, "notes": list(dump.notes)}
    return told | {"step_note": step, "other_step": other, "loss": dump.loss}


def refuse_reread(folder: RunFolder, dump: Dump, sha256: str, *, table: str) -> None:
    """Raise InputError if the folder's run has the same files and settings, but was read differently.

    sha256: of the rollouts now. table: name of the folder's token table, which shows the difference.
    """
    manifest = folder.manifest or {}
    changed = folder.changes(manifest).keys()
    same = (manifest.get("rollouts") or {}).get("sha256") == sha256
    if not same or "rollouts" not in changed or changed - {"rollouts", "gradscope"}:
        return
    told, path = "", folder.folder / table
    if path.is_file():
        told = describe_reread(pd.read_parquet(path, columns=["group"]), dump.batch)
    raise InputError(
        f"{folder.folder} was made from these rollouts by an earlier version, which {told or 'read them differently'}; "
        "its results may be wrong: give --overwrite to redo it, or another --out"
    )
