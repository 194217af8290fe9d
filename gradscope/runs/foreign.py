"""Files that somebody else wrote, of which nothing is run; whatever is wrong with one is an InputError."""

from __future__ import annotations

import io
import json
import os
import warnings
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from gradscope.errors import BROKEN_FILE, InputError, first_line, unpickling_reason
from gradscope.runs.inert import Array, Inert, stand_ins

PACKED = {".zst": "zstd", ".gz": "gzip"}
"""Compressions of lines, by what a file's name ends in."""


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text; ValueError for what is none, or nested too deeply.

    >>> parse_json('{"a": [1, null]}')
    {'a': [1, None]}
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def parse_json_file(path: Path) -> Any:
    """The value in a file of JSON; OSError, or ValueError, where there is none."""
    return parse_json(Path(path).read_bytes())


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None if there is no such file, an empty one if it cannot be read."""
    if not os.path.isfile(path):  # of a name that is too long, Path raises
        return None
    try:
        value = parse_json_file(path)
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def read_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file, or of what is PACKED in one, each with its end; only the last may lack one."""
    try:
        with _open(path) as file:
            yield from file
    except BROKEN_FILE as error:  # pyarrow's are OSError or ValueError here
        raise InputError(f"{path} cannot be read ({first_line(error)}); give a sound file") from error


def _open(path: Path) -> BinaryIO:
    if path.suffix not in PACKED:
        return path.open("rb")
    import pyarrow as pa

    return io.BufferedReader(pa.input_stream(str(path), compression=PACKED[path.suffix]))


def read_parquet(path: Path, columns: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
    """The rows of a parquet file, a few at a time, in plain lists and None, where pandas gives arrays and NaN.

    columns: those that are read, which must be there; None: all.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if twice := [name for name, n in Counter(names).items() if n > 1]:
                raise InputError(f"{path} has the column {twice[0]!r:.60} twice; write it again with one of them")
            if missing := [column for column in columns or () if column not in names]:
                raise InputError(f"{path} has no column {', '.join(missing)}; wanted {', '.join(columns)}")
            for batch in file.iter_batches(batch_size=256, columns=columns):
                for start in range(0, len(batch), 8):  # who looks at the first row alone does not wait for all
                    yield from batch.slice(start, 8).to_pylist()
    except InputError:
        raise
    except (*BROKEN_FILE, pa.ArrowException) as error:
        raise InputError(f"{path} cannot be read as parquet ({first_line(error)}); write it again") from error


def parquet_metadata(path: Path) -> dict[bytes, bytes]:
    """Return the metadata of a parquet file's schema; empty for a file that cannot be read, which reading refuses."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.read_schema(path).metadata or {}
    except (*BROKEN_FILE, pa.ArrowException):
        return {}


def parquet_values(path: Path, column: str) -> set[Any] | None:
    """Return the values of a parquet file's column where its statistics alone tell them: one in each row group."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
        parts = [part for group in groups for part in map(group.column, range(group.num_columns))]
        found = [part.statistics for part in parts if part.path_in_schema == column]
    except (*BROKEN_FILE, pa.ArrowException):
        return None
    told = all(s is not None and s.has_min_max and not s.null_count and s.min == s.max for s in found)
    return {s.min for s in found} if told and found else None


def numbers_of(tensor: Any) -> Any:
    """The numbers of a tensor, or of numpy's array, as lists; ValueError for a sparse one, one whose numbers are not
    there, and for an object whose code was not run."""
    if isinstance(tensor, Array):
        return tensor.numbers()
    if isinstance(tensor, Inert):
        raise ValueError(f"it is {tensor!r}")
    try:
        return tensor.tolist()
    except (RuntimeError, TypeError) as error:
        raise ValueError(first_line(error)) from error


def load_tensors(
    path: Path,
    *,
    mapped: bool = False,
    inert: bool = False,
    known: Sequence[tuple[type, str]] = (),
    part: tuple[int, int] | None = None,
    content: bytes | None = None,
) -> Any:
    """What torch saved, of tensors and plain values alone, on the CPU; mapped: tensors stay in the file where they can.

    Nothing in it is run: whatever would have to be is refused.
    inert: objects of other classes are not refused but come as objects of `runs.inert`, of which nothing was run.
    known: classes of ours that stand for others by name. part: where it begins in the file and how many bytes it has;
    None: all of it. content: its bytes, where they are known already.
    """
    import torch

    try:
        if part is not None:
            content = _cut(path, *part)
        source = path if content is None else io.BytesIO(content)
        packed = zipfile.is_zipfile(source)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a pickle of an odd protocol: what fails is said below
            if content is not None:
                source.seek(0)
            foreign = torch.serialization.get_unsafe_globals_in_checkpoint(path) if inert and packed else []
            with torch.serialization.safe_globals([*stand_ins(foreign), *known]):
                mapped = mapped and packed and content is None
                return torch.load(source, map_location="cpu", weights_only=True, mmap=mapped)
    except (*BROKEN_FILE, zipfile.BadZipFile, AssertionError) as error:
        reason = unpickling_reason(error)
        raise InputError(
            f"it cannot be read as tensors and plain values ({reason}); nothing in it was run; give a file without "
            "pickled objects",
            path=path,
        ) from error


def _cut(path: Path, start: int, length: int) -> bytes:
    """That part of a file; EOFError where the file ends before it."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if not 0 <= start <= start + length <= size:
            raise EOFError(f"the file ends at {size:,} bytes, and what is saved there at {start + length:,}")
        file.seek(start)
        return file.read(length)
