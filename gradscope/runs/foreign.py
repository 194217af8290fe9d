"""Reading untrusted files without executing anything in them; any problem raises InputError."""

from __future__ import annotations

import io
import json
import os
import warnings
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gradscope.errors import BROKEN_FILE, InputError, first_line, unpickling_reason
from gradscope.runs.inert import stand_ins

PACKED = {".zst": "zstd", ".gz": "gzip"}
"""Compression of text files, by suffix."""


def parse_json(text: str | bytes) -> Any:
    """Parse JSON. Raises ValueError if it is invalid or nested too deeply.

    >>> parse_json('{"a": [1, null]}')
    {'a': [1, None]}
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def parse_json_file(path: Path) -> Any:
    """Parse a JSON file. Raises OSError or ValueError."""
    return parse_json(Path(path).read_bytes())


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the object in a JSON file; None if the file does not exist, {} if it cannot be read."""
    if not os.path.isfile(path):  # of a name that is too long, Path raises
        return None
    try:
        value = parse_json_file(path)
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def read_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file, possibly compressed, with line ends; the last one may lack it."""
    try:
        if path.suffix in PACKED:
            import pyarrow as pa

            file = io.BufferedReader(pa.input_stream(str(path), compression=PACKED[path.suffix]))
        else:
            file = path.open("rb")
        with file:
            yield from file
    except BROKEN_FILE as error:  # pyarrow raises OSError or ValueError here
        raise InputError(f"{path} cannot be read ({first_line(error)}); give a sound file") from error


def read_parquet(path: Path, columns: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
    """Yield the rows of a parquet file with plain lists and None, where pandas would give arrays and NaN.

    columns: names to read, which must exist; None: all.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if twice := [name for name, n in Counter(names).items() if n > 1]:
                raise InputError(f"{path} has the column {twice[0]!r:.60} twice; keep one of them")
            if missing := [column for column in columns or () if column not in names]:
                raise InputError(f"{path} has no column {', '.join(missing)}; wanted {', '.join(columns)}")
            for batch in file.iter_batches(batch_size=256, columns=columns):
                for start in range(0, len(batch), 8):  # so that reading just the first row is fast
                    yield from batch.slice(start, 8).to_pylist()
    except InputError:
        raise
    except (*BROKEN_FILE, pa.ArrowException) as error:
        raise InputError(f"{path} cannot be read as parquet ({first_line(error)}); write it again") from error


def read_arrow(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of an Arrow file, a stream as `datasets` writes it or a file, with plain lists and None."""
    import pyarrow as pa

    try:
        with pa.memory_map(str(path)) as source:
            is_file = source.read(6) == b"ARROW1"
            source.seek(0)
            reader = pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)
            many = range(reader.num_record_batches) if is_file else ()
            for batch in (reader.get_batch(place) for place in many) if is_file else reader:
                batch.validate(full=True)  # offsets beyond its buffers would be followed
                for start in range(0, len(batch), 8):
                    yield from batch.slice(start, 8).to_pylist()
    except (*BROKEN_FILE, pa.ArrowException) as error:
        raise InputError(f"{path} cannot be read as Arrow ({first_line(error)}); write it again") from error


def parquet_metadata(path: Path) -> dict[bytes, bytes]:
    """Return the metadata of a parquet file's schema; empty if it cannot be read (reading it will raise)."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.read_schema(path).metadata or {}
    except (*BROKEN_FILE, pa.ArrowException):
        return {}


def parquet_values(path: Path, column: str) -> set[Any] | None:
    """Return the values of a column of a parquet file; None if it cannot be read, or holds more than plain values."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            return {*file.read([column])[column].unique().to_pylist()}
    except (*BROKEN_FILE, pa.ArrowException):
        return None


def load_tensors(
    path: Path,
    *,
    mapped: bool = False,
    inert: bool = False,
    known: Sequence[tuple[type, str]] = (),
    part: tuple[int, int] | None = None,
    content: bytes | None = None,
) -> Any:
    """Load tensors and plain values saved by torch, on the CPU; mapped: leave tensors memory-mapped if possible.

    Nothing in the file is executed; anything that would need to be is refused.
    inert: instead of refusing objects of other classes, replace them by the stand-ins of `runs.inert`.
    known: our classes that stand in for others by name. part: offset and length in bytes within the file; None: all of
    it. content: the bytes, if already read.
    """
    import torch

    try:
        if part is not None:
            content = _cut(path, *part)
        source = path if content is None else io.BytesIO(content)
        packed = zipfile.is_zipfile(source)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about unusual pickle protocols; failures are reported below
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
    """Read a part of a file. Raises EOFError if the file is too short."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if not 0 <= start <= start + length <= size:
            raise EOFError(f"the file ends at {size:,} bytes, but its contents should end at {start + length:,}")
        file.seek(start)
        return file.read(length)
