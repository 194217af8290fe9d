"""Files that somebody else wrote, read without running anything and at the cost that their size explains.

A compressed file may unpack to MOST times its size, which no log comes near and a bomb exceeds; a line is at most
LONGEST_LINE long. Whatever else is wrong with a file is an InputError too.
"""

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
from gradscope.runs.footer import count_values
from gradscope.runs.inert import Array, Inert, stand_ins

MOST = 1000
"""Times its size that a compressed file may unpack to: logs unpack to 5 or 20 times, bombs to 10,000 and more."""
MOST_VALUES = 100
"""Values of parquet for each byte of its size: logs have one or two, a million rows that are all alike a thousand."""
SPARE = 1 << 22
"""Bytes, or values, that a small file may unpack to besides."""
MOST_COLUMNS = 10_000
"""Columns of a row; the widest log has a few dozen."""
PACKED = {".zst": "zstd", ".gz": "gzip"}
"""Compressions of lines, by what a file's name ends in."""
LONGEST_LINE = 1 << 30
"""Bytes of a line: a whole step of text in one object is a few hundred million."""


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text; ValueError, too, for a name that stands twice in one object and for one too deep.

    >>> parse_json('{"a": [1, null]}')
    {'a': [1, None]}
    >>> parse_json('{"a": 1, "b": 2, "a": 3}')
    Traceback (most recent call last):
    ValueError: 'a' stands there twice
    """
    try:
        return json.loads(text, object_pairs_hook=_object)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except MemoryError as error:
        raise ValueError("it takes more memory than there is") from error


def parse_json_file(path: Path) -> Any:
    """The value in a file of JSON; OSError, or ValueError, where there is none."""
    if not os.path.isfile(path):  # a pipe would never end
        raise FileNotFoundError("it is no file")
    if (size := os.path.getsize(path)) > LONGEST_LINE:
        raise ValueError(f"it has {size:,} bytes")
    return parse_json(Path(path).read_bytes())


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; ValueError for a name that stands there twice, where json would take the last."""
    found = dict(pairs)
    if len(found) < len(pairs):
        name = next(name for name, n in Counter(name for name, _ in pairs).items() if n > 1)
        raise ValueError(f"{name!r:.60} stands there twice")
    return found


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
        left = path.stat().st_size * MOST + SPARE if path.suffix in PACKED else None
        with _open(path) as file:
            while line := file.readline(LONGEST_LINE + 1 if left is None else min(LONGEST_LINE, left) + 1):
                if left is not None and (left := left - len(line)) < 0:
                    raise InputError(f"{path} unpacks to more than {MOST:,} times its size; give it uncompressed")
                if len(line) > LONGEST_LINE:
                    raise InputError(f"{path} has a line of more than {LONGEST_LINE:,} bytes; write shorter ones")
                yield line
    except InputError:
        raise
    except (*BROKEN_FILE, MemoryError) as error:  # pyarrow's are OSError or ValueError here
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
            if (width := file.metadata.num_columns) > MOST_COLUMNS:
                raise InputError(f"{path} has {width:,} columns; give at most {MOST_COLUMNS:,}")
            names = file.schema_arrow.names
            if twice := [name for name, n in Counter(names).items() if n > 1]:
                raise InputError(f"{path} has the column {twice[0]!r:.60} twice; write it again with one of them")
            if missing := [column for column in columns or () if column not in names]:
                raise InputError(f"{path} has no column {', '.join(missing)}; wanted {', '.join(columns)}")
            _check_unpacked(path, file.metadata.num_rows)
            for batch in file.iter_batches(batch_size=256, columns=columns):
                yield from batch.to_pylist()
    except InputError:
        raise
    except (*BROKEN_FILE, pa.ArrowException, MemoryError) as error:
        raise InputError(f"{path} cannot be read as parquet ({first_line(error)}); write it again") from error


def _check_unpacked(path: Path, rows: int) -> None:
    """InputError for more values, or bytes of them, than its size explains: one byte may stand for billions."""
    values, unpacked = count_values(path)
    values, size = max(values, rows), path.stat().st_size
    if unpacked > MOST * size + SPARE or values > MOST_VALUES * size + SPARE // 4:
        raise InputError(
            f"{path} unpacks to {values:,} values from {size:,} bytes; write fewer, or without packing them"
        )


def numbers_of(tensor: Any) -> Any:
    """The numbers of a tensor, or of numpy's array, as lists; ValueError for a sparse one, one whose numbers are not
    there, or few of them many times over, and for an object whose code was not run."""
    if isinstance(tensor, Array):
        return tensor.numbers()
    if isinstance(tensor, Inert):
        raise ValueError(f"it is {tensor!r}")
    try:
        if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes() * MOST + SPARE:
            raise ValueError(f"it holds {tensor.numel():,} numbers in {tensor.untyped_storage().nbytes():,} bytes")
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

    Nothing in it is run: whatever would have to be is refused, and so is an archive that unpacks to more than its size.
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
        if packed:
            with zipfile.ZipFile(source) as archive:
                size = sum(entry.file_size for entry in archive.infolist())
            if size > (path.stat().st_size if content is None else len(content)):
                raise InputError(f"it unpacks to {size:,} bytes, more than it has; save it with torch.save", path=path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a pickle of an odd protocol: what fails is said below
            if content is not None:
                source.seek(0)
            foreign = torch.serialization.get_unsafe_globals_in_checkpoint(path) if inert and packed else []
            with torch.serialization.safe_globals([*stand_ins(foreign), *known]):
                mapped = mapped and packed and content is None
                return torch.load(source, map_location="cpu", weights_only=True, mmap=mapped)
    except InputError:
        raise
    except (*BROKEN_FILE, zipfile.BadZipFile, AssertionError, MemoryError) as error:
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
