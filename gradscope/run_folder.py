"""A folder of results that is written whole or not at all, and whose unfinished run can be taken up again."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pandas as pd

from gradscope.errors import InputError

MANIFEST = "manifest.json"


class RunFolder:
    """DIR, with what is not finished in DIR/.partial, keyed by all settings that change a number.

    The same key takes an unfinished run up again and leaves a finished one alone; another key is refused.
    """

    def __init__(self, folder: str | Path, key: dict[str, Any]) -> None:
        self.folder, self.key = Path(folder), json.loads(json.dumps(key, default=str))
        self.partial = self.folder / ".partial"

    @property
    def finished(self) -> bool:
        """Whether the folder holds the finished run of this key."""
        return _read_key(self.folder / MANIFEST) == self.key

    def open(self, *, overwrite: bool = False) -> bool:
        """Prepare the folder to be written; True if an unfinished run of the same key is taken up again.

        Raises InputError if it holds a run with another key, or results without a manifest; with `overwrite` these go.
        """
        if self.folder.exists() and not self.folder.is_dir():
            raise InputError(f"{self.folder} is a file; give a folder for the results")
        found = _read_key(self.folder / MANIFEST)
        unfinished = _read_key(self.partial / "key.json")
        if overwrite:
            shutil.rmtree(self.partial, ignore_errors=True)
            (self.folder / MANIFEST).unlink(missing_ok=True)
        elif found is not None:
            raise InputError(f"{self.folder} holds {_difference(found, self.key)}; give another --out, or --overwrite")
        elif unfinished is not None and unfinished != self.key:
            raise InputError(
                f"{self.folder} holds an unfinished {_difference(unfinished, self.key)}; give its arguments to finish "
                "it, another --out, or --overwrite"
            )
        elif unfinished is None and (self.folder / "tokens.parquet").exists():
            raise InputError(f"{self.folder} holds a tokens.parquet without its manifest; give another --out, or --overwrite")
        self.partial.mkdir(parents=True, exist_ok=True)
        resumed = unfinished == self.key and not overwrite
        write_json(self.partial / "key.json", {"key": self.key})
        return resumed

    def part(self, index: int) -> Path:
        """Where part `index` of the run lies until all are there."""
        return self.partial / f"part-{index:06d}.parquet"

    def write_part(self, index: int, frame: pd.DataFrame) -> None:
        write_parquet(self.part(index), frame)

    def read_parts(self, count: int) -> list[pd.DataFrame]:
        return [pd.read_parquet(self.part(index)) for index in range(count)]

    def close(self, table: pd.DataFrame, manifest: dict[str, Any]) -> None:
        """Put the finished table and its manifest in place, the manifest last, and drop the parts."""
        write_parquet(self.folder / "tokens.parquet", table)
        write_json(self.folder / MANIFEST, manifest | {"key": self.key})
        shutil.rmtree(self.partial)


def write_parquet(path: Path, frame: pd.DataFrame) -> None:
    """Write beside, then rename: a reader never sees half a file."""
    beside = path.with_name(f".{path.name}.tmp")
    frame.to_parquet(beside, index=False)
    os.replace(beside, path)


def write_json(path: Path, value: dict[str, Any]) -> None:
    write_text(path, json.dumps(value, indent=2, default=str) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write beside, then rename."""
    beside = path.with_name(f".{path.name}.tmp")
    beside.write_text(text)
    os.replace(beside, path)


def file_hash(path: str | Path) -> str:
    """SHA-256 of a file."""
    with Path(path).open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _read_key(path: Path) -> dict[str, Any] | None:
    """The key in a JSON file of this module; None if there is no such file, an empty one if it cannot be read."""
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text())["key"]
    except (json.JSONDecodeError, KeyError, TypeError):
        return {}


def _difference(found: dict[str, Any], wanted: dict[str, Any]) -> str:
    """In words, what was run there that is not asked for now."""
    changed = [name for name in {**found, **wanted} if found.get(name) != wanted.get(name)]
    return f"run with other arguments ({', '.join(changed[:4]) or 'an unreadable manifest'})"
