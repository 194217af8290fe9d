"""What a manifest says of rollouts, and a run of which an earlier reader took them otherwise."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from gradscope.errors import InputError
from gradscope.gradients import describe_reread
from gradscope.rollouts import READER, Dump
from gradscope.runs import RunFolder, file_hash


def own_weightings(methods: Iterable[str]) -> list[str]:
    """Hash the user's files among weightings, FILE.py:NAME[:key=value,…]."""
    return [file_hash(Path(method.rpartition(".py:")[0] + ".py")) for method in methods if ".py:" in method]


def describe_dump(path: Path, dump: Dump, sha256: str) -> dict[str, Any]:
    """Describe rollouts for a manifest: file, hash, format, and the notes a reader must know."""
    step = next((note for note in dump.notes if note.kind in ("step", "other-step")), None)
    other = any(note.kind == "other-step" for note in dump.notes)
    told = {"path": str(path), "sha256": sha256, "format": dump.format, "reader": READER, "notes": list(dump.notes)}
    return told | {"step_note": step, "other_step": other}


def refuse_reread(folder: RunFolder, dumps: Sequence[Dump], *, table: str | None = None) -> None:
    """Raise InputError if the folder's run has the same files and settings, but was read differently.

    table: name of the token table in the folder, if it has one, of which can be told what was taken otherwise.
    """
    manifest = folder.manifest or {}
    earlier, now = (
        {name: value for name, value in key.items() if name not in ("read", "gradscope")}
        for key in (manifest.get("key", {}), folder.key)
    )
    read = manifest.get("key", {}).get("read")
    if earlier != now or read == folder.key["read"]:
        return
    told, path = "", None if table is None else folder.folder / table
    if path is not None and path.is_file():
        told = describe_reread(pd.read_parquet(path, columns=["group"]), dumps[0].batch)
    raise InputError(
        f"{folder.folder} was made of these rollouts by an earlier reader, which {told or 'took them otherwise'}; what "
        "it says may be wrong: --overwrite makes it anew, or give another --out"
    )
