"""How many values a parquet file holds, read from its footer by hand: pyarrow ends the process if the footer lies."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

ROW_GROUPS, COLUMNS, META_DATA, NUM_VALUES, UNPACKED_BYTES = 4, 1, 3, 5, 6
"""Fields of FileMetaData, RowGroup, ColumnChunk and ColumnMetaData, by their numbers in parquet.thrift."""


def count_values(path: Path) -> tuple[int, int]:
    """(values of all columns, bytes that they take unpacked), as the footer says."""
    values = unpacked = 0
    for column in _columns(_read_struct(io.BytesIO(_footer(path)))):
        values += column.get(NUM_VALUES, 0)
        unpacked += column.get(UNPACKED_BYTES, 0)
    return values, unpacked


def _footer(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(-8, io.SEEK_END)
        size = int.from_bytes(file.read(4), "little")
        file.seek(-8 - size, io.SEEK_END)
        return file.read(size)


def _columns(metadata: dict[int, Any]) -> Iterator[dict[int, Any]]:
    for group in metadata.get(ROW_GROUPS, ()):
        for chunk in group.get(COLUMNS, ()):
            yield chunk.get(META_DATA, {})


def _read_struct(file: BinaryIO) -> dict[int, Any]:
    """A struct of thrift's compact protocol: field number → value."""
    found, number = {}, 0
    while (head := file.read(1)[0]) & 15:
        number = number + (head >> 4) if head >> 4 else _unfolded(file)
        kind = head & 15
        found[number] = kind == 1 if kind in (1, 2) else _read_value(file, kind)
    return found


def _read_value(file: BinaryIO, kind: int) -> Any:
    if kind in (1, 2, 3):
        return file.read(1)[0]
    if kind in (4, 5, 6):
        return _unfolded(file)
    if kind in (7, 13):
        return file.read(8 if kind == 7 else 16)
    if kind == 8:
        return file.read(_varint(file))
    if kind in (9, 10):
        head = file.read(1)[0]
        size = _varint(file) if head >> 4 == 15 else head >> 4
        return [_read_value(file, head & 15) for _ in range(size)]
    if kind == 11:
        size = _varint(file)
        kinds = file.read(1)[0] if size else 0
        return [(_read_value(file, kinds >> 4), _read_value(file, kinds & 15)) for _ in range(size)]
    if kind == 12:
        return _read_struct(file)
    raise ValueError(f"thrift has no type {kind}")


def _varint(file: BinaryIO) -> int:
    value, shift = 0, 0
    while (part := file.read(1)[0]) & 128:
        if shift > 63:
            raise ValueError("a number of more than 64 bits")
        value, shift = value | (part & 127) << shift, shift + 7
    return value | part << shift


def _unfolded(file: BinaryIO) -> int:
    """A signed number, of which the lowest bit is the sign."""
    value = _varint(file)
    return value >> 1 ^ -(value & 1)
