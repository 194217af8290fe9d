"""Tables as files: the CSV with its numbers, and beside it the same rows as Markdown, to be read."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import pandas as pd

ABSENT = "–"
"""What Markdown shows for a number that is not there."""


def write_table(table: pd.DataFrame, path: Path, *, digits: int = 3, shown: pd.DataFrame | None = None) -> Path:
    """Write path.csv (six significant digits) and path.md (floats to `digits` decimals); returns the CSV's path.

    shown: what Markdown shows in place of the table, such as the same numbers laid out as in the paper. The index is
    not written. Either file appears whole or not at all, and the same table gives the same bytes.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    csv = table.to_csv(index=False, float_format="%.6g", lineterminator="\n")
    markdown = to_markdown(table if shown is None else shown, digits=digits)
    for suffix, text in ((".csv", csv), (".md", markdown)):
        partial = path.with_name(f".{path.stem}{suffix}.partial")
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path.with_suffix(suffix))
    return path.with_suffix(".csv")


def to_markdown(table: pd.DataFrame, *, digits: int = 3) -> str:
    """The table in Markdown, numbers to the right; floats to `digits` decimals, NaN and None as a dash.

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
