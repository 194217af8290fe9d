"""Single files: replaced whole or not at all, and hashed."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

ROW_GROUP = 2**16
"""Rows of a table that are held as it is written in parts."""


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`, and rename what was written there to `path` when the block ends.

    A reader never sees half a file, or half a folder: where the block raises, `path` stays as it was and the temporary
    file or folder (`.NAME.partial`) is removed. An OSError that names no file, as a full disk's, then names `path`.
    """
    path = Path(path)
    partial = path.with_name(f".{path.name}.partial")
    _remove(partial)  # left by a run that was killed
    try:
        yield partial
        if partial.is_dir():
            _remove(path)
        os.replace(partial, path)
    except BaseException as error:
        with suppress(OSError):
            _remove(partial)
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            raise OSError(error.errno, os.strerror(error.errno), str(path)) from error
        raise


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text, whole or not at all."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_parquet(path: Path, frame: pd.DataFrame) -> None:
    """Write a table without its index, whole or not at all."""
    with replacing(path) as partial:
        frame.to_parquet(partial, index=False)


def write_parquet_parts(path: Path, frames: Iterable[pd.DataFrame]) -> None:
    """Write the table that all frames make, in their order, whole or not at all; about ROW_GROUP rows are held at once.

    The frames have the same columns, of the same types; one without rows may have none, but not all are without.
    """
    import pandas as pd
    import pyarrow as pa
    from pyarrow.parquet import ParquetWriter

    with replacing(path) as partial, partial.open("wb") as handle, ExitStack() as stack:
        writer = None
        for held in _row_groups(frames):
            table = pa.Table.from_pandas(pd.concat(held), preserve_index=False)
            writer = writer or stack.enter_context(ParquetWriter(handle, table.schema))
            writer.write_table(table)


def _row_groups(frames: Iterable[pd.DataFrame]) -> Iterator[list[pd.DataFrame]]:
    held, rows = [], 0
    for frame in filter(len, frames):
        held.append(frame)
        rows += len(frame)
        if rows >= ROW_GROUP:
            yield held
            held, rows = [], 0
    if held:
        yield held


def write_json(path: Path, value: dict[str, Any]) -> None:
    """NaN and infinity become null, which every JSON reader takes."""
    write_text(path, json.dumps(plain_json(value), indent=2, default=str, allow_nan=False) + "\n")


def plain_json(value: Any) -> Any:
    """The value with null for NaN and infinity, and lists for tuples."""
    if isinstance(value, Mapping):
        return {name: plain_json(v) for name, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def file_hash(path: str | Path) -> str:
    """SHA-256 of a file."""
    with Path(path).open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
