"""Writing single files atomically, and hashing them."""

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
"""Rows buffered while a table is written in parts."""


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path, and rename what was written there to `path` when the block ends.

    Readers never see an incomplete file or folder: if the block raises, `path` is unchanged and the temporary file or
    folder (`.NAME.partial`) is removed. An OSError without a file name, as for a full disk, gets `path`.
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
    """Write UTF-8 text atomically."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_parquet(path: Path, frame: pd.DataFrame) -> None:
    """Write a table without its index, atomically."""
    with replacing(path) as partial:
        frame.to_parquet(partial, index=False)


def write_parquet_parts(path: Path, frames: Iterable[pd.DataFrame]) -> None:
    """Write all frames atomically, buffering about ROW_GROUP rows; only empty frames may lack columns."""
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
    """Write JSON, with null for NaN and infinity, which not every reader accepts."""
    write_text(path, json.dumps(plain_json(value), indent=2, default=str, allow_nan=False) + "\n")


def plain_json(value: Any) -> Any:
    """Replace NaN and infinity by None, and tuples by lists."""
    if isinstance(value, Mapping):
        return {name: plain_json(v) for name, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def file_hash(path: str | Path) -> str:
    """Return the SHA-256 of a file."""
    with Path(path).open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
