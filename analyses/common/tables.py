"""Tables as files, written atomically and read only if complete: CSV with the numbers, Markdown for people."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import pandas as pd

from analyses.common.places import data_of
from gradscope.errors import InputError, first_line
from gradscope.runs import replacing, write_text

PAPER_NORMS = (0.71, 0.36, 0.24, 0.15, 0.82)
"""Fig. 1 (d) of the paper, read off the image: four intervals, then all tokens."""
ABSENT = "–"
"""Markdown for a missing number."""


def read_whole(file: Path, remedy: str, *, columns: Sequence[str] = (), empty: bool = False) -> pd.DataFrame:
    """Read a .csv, .csv.gz or .parquet table. Raises InputError with the remedy if it is damaged.

    columns: required columns, without missing values. empty: the table may have no rows. A column `level` of a CSV is
    text, even if it has only digits.
    """
    try:
        table = pd.read_parquet(file) if file.suffix == ".parquet" else pd.read_csv(file, dtype={"level": str})
    except (ValueError, OSError, EOFError, zlib.error) as error:  # pandas', pyarrow's and gzip's
        raise InputError(f"{file} cannot be read ({first_line(error)}); {remedy}") from error
    if table.empty and not empty:
        raise InputError(f"{file} has no rows; {remedy}")
    check_columns(table, columns, str(file), remedy)
    return table


def check_columns(table: pd.DataFrame, columns: Sequence[str], name: str, remedy: str) -> None:
    """Raise InputError with the table's name and the remedy if a column is missing or has missing values."""
    if absent := [column for column in columns if column not in table or table[column].isna().any()]:
        raise InputError(f"{name} has no {absent[0]!r}, or not in every row; {remedy}")


def write_csv(table: pd.DataFrame, path: Path, *, float_format: str | None = None) -> None:
    """Write the table without its index, atomically; compressed if the path ends in .gz."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # The same table gives the same bytes, whenever it is written.
    packed = {"method": "gzip", "mtime": 1} if path.suffix == ".gz" else None
    with replacing(path) as beside:
        table.to_csv(beside, index=False, float_format=float_format, lineterminator="\n", compression=packed)


def write_parquet(table: pd.DataFrame, path: Path) -> None:
    """Write the table without its index, atomically, with the encodings that keep it smallest."""
    floats = [str(column) for column in table.columns if table[column].dtype.kind == "f"]
    others = [str(column) for column in table.columns if table[column].dtype.kind != "f"]
    how = {"use_byte_stream_split": floats, "use_dictionary": others, "compression": "zstd", "compression_level": 19}
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as beside:
        table.to_parquet(beside, index=False, **how)


def write_table(table: pd.DataFrame, path: Path, *, digits: int = 3, shown: pd.DataFrame | None = None) -> None:
    """Write path, in Markdown (floats to `digits` decimals), and its CSV (six significant digits).

    shown: table for Markdown, such as the same numbers laid out as in the paper. The index is not written. Both files
    are written atomically, and the same table gives the same bytes.
    """
    write_csv(table, data_of(path), float_format="%.6g")
    write_text(path, to_markdown(table if shown is None else shown, digits=digits))


def to_markdown(table: pd.DataFrame, *, digits: int = 3) -> str:
    """Return the table in Markdown, numbers right-aligned; floats to `digits` decimals, NaN and None as a dash.

    >>> print(to_markdown(pd.DataFrame({"method": ["GRPO"], "accuracy": [0.41234]}), digits=2), end="")
    | method | accuracy |
    |---|---:|
    | GRPO | 0.41 |
    """
    rules = ["---:" if pd.api.types.is_numeric_dtype(dtype) else "---" for dtype in table.dtypes]
    lines = [_line(table.columns.astype(str)), f"|{'|'.join(rules)}|"]
    lines += [_line(_cell(value, digits) for value in row) for row in table.itertuples(index=False, name=None)]
    return "\n".join(lines) + "\n"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(value: object, digits: int) -> str:
    if pd.isna(value):
        return ABSENT
    text = f"{value:.{digits}f}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")
