"""The files of a log, whatever trainer wrote them: which there are, and their records with the place of each."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from gradscope.errors import InputError, show
from gradscope.runs import MOST_COLUMNS, file_hash, load_tensors, numbers_of, parse_json, read_lines, read_parquet

SUFFIXES = (".jsonl", ".json", ".parquet", ".pt", ".zst")
"""What a file of rollouts may end in; .json is read as .jsonl, and .jsonl.zst is a compressed one."""

IN_FOLDERS = (".jsonl", ".parquet", ".pt", ".zst")
"""What is read of a folder: trainers leave a metadata.json beside their dumps."""

SINGULAR = {"response_lengths": "response_length", "loss_masks": "loss_mask", "sample_indices": "sample_index"}
"""Columns of train data that hold lists, and what they are called in one sample."""


@dataclass(frozen=True)
class Record:
    """One row of a file as it stands there, without its nulls."""

    path: Path
    place: str
    """File, row and line, for errors."""
    columns: dict[str, Any]
    torn: bool = False
    """A last line that was cut off while it was written, of which nothing is known."""


def list_files(path: Path) -> list[Path]:
    """The file itself, or those of a folder: its own, else those of its step_N folders; numbers in order of size.

    Of a folder with annotations/ (prime-rl's traces) these, and its stream.
    """
    if os.path.isfile(path):  # of a name that is too long, Path raises
        _check_suffix(path)
        return [path]
    if not os.path.isdir(path):
        raise InputError(f"{path} is not there; give a file of rollouts, or a folder of rollout files")
    traces = ("annotations/**/*", "stream*", "stream*/*") if (path / "annotations").is_dir() else ()
    for patterns in (traces, ("*",), ("step_*/*",)):
        found = {file for pattern in patterns for file in path.glob(pattern)}
        files = [f for f in found if f.is_file() and f.suffix in IN_FOLDERS and f.name[0] != "."]
        # A file that was being compressed when its run died is there twice.
        files = [f for f in files if f.suffix != ".zst" or f.with_suffix("") not in files]
        if files:
            return sorted(files, key=_natural_key)
    raise InputError(
        f"{path} is a folder without {', '.join(IN_FOLDERS)} files; give the folder that holds the rollouts"
    )


def rollouts_hash(path: Path) -> str:
    """SHA-256 of a file; of a folder, that of its files' names and contents, in the order they are read."""
    files = list_files(path)
    if files == [path]:
        return file_hash(path)
    return hashlib.sha256("".join(f"{f.relative_to(path)} {file_hash(f)}\n" for f in files).encode()).hexdigest()


def read_records(path: Path, *, torn: bool = False) -> Iterator[Record]:
    """Every record of one file, in order. torn: a last line that was cut off is a record too; else it is refused."""
    if path.suffix in (".parquet", ".pt"):
        read = _read_parquet if path.suffix == ".parquet" else _read_tensors
        records = (Record(path, place, columns) for place, columns in read(path))
    else:
        records = _read_jsonl(path, torn)
    for record in records:
        yield replace(record, columns={name: value for name, value in record.columns.items() if value is not None})


def _natural_key(path: Path) -> list[Any]:
    """step_2 before step_10: split at numbers, which compare as such."""
    return [int(part) if place % 2 else part for place, part in enumerate(re.split(r"([0-9]+)", str(path)))]


def _check_suffix(path: Path) -> None:
    if path.suffix not in SUFFIXES:
        ending = f"ends in {path.suffix!r}" if path.suffix else "has no suffix"
        raise InputError(f"{path} {ending}; rollouts are {', '.join(SUFFIXES)} files")


def _read_jsonl(path: Path, torn: bool) -> Iterator[Record]:
    index = 0
    for number, line in enumerate(read_lines(path), start=1):
        if not line.strip():
            continue
        place = f"{path}, row {index} (line {number})"
        try:
            row = parse_json(line)
        except ValueError as error:  # UnicodeDecodeError is one too
            if torn and not line.endswith(b"\n"):
                yield Record(path, place, {}, torn=True)
                return
            raise InputError(f"{place}: not JSON ({error}); write one object per line") from error
        if not isinstance(row, dict):
            raise InputError(f"{place}: a JSON {type(row).__name__}; write one object per line, {{column: value}}")
        if len(row) > MOST_COLUMNS:
            raise InputError(f"{place}: {len(row):,} columns; give at most {MOST_COLUMNS:,}")
        yield Record(path, place, row)
        index += 1


def _read_parquet(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    return ((f"{path}, row {index}", row) for index, row in enumerate(read_parquet(path)))


def _read_tensors(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The samples of a file that torch saved; weights_only: nothing in it is run."""
    content = load_tensors(path)
    samples = content.get("samples", _split_columns(path, content)) if isinstance(content, dict) else None
    if not isinstance(samples, list) or not all(isinstance(sample, dict) for sample in samples):
        found = show([*content]) if isinstance(content, dict) else type(content).__name__
        raise InputError(
            f"{path} holds no list `samples` but {found}; give debug rollout or train data of slime or miles"
        )
    shared = {"rollout_id": content.get("rollout_id")}
    for index, sample in enumerate(samples):
        place = f"{path}, sample {index}"
        plain = {name: _plain(place, name, v) for name, v in sample.items() if isinstance(name, str)}
        yield place, shared | {name: v for name, v in plain.items() if v is not None}


def _split_columns(path: Path, content: dict[str, Any]) -> list[dict[str, Any]] | None:
    """The samples of train data that hold a list per column, by the names of those that hold one per sample.

    Only columns with an entry for each sample; `raw_reward` is left out, for it is of all ranks, in another order.
    """
    data = content.get("rollout_data")
    tokens = data.get("tokens") if isinstance(data, dict) else None
    if not isinstance(tokens, list):
        return None
    lists = {name: _plain(f"{path}", name, v) for name, v in data.items() if isinstance(name, str)}
    lists = {SINGULAR.get(n, n): v for n, v in lists.items() if isinstance(v, list) and len(v) == len(tokens)}
    lists = {name: values for name, values in lists.items() if name != "raw_reward"}
    return [{name: values[index] for name, values in lists.items()} for index in range(len(tokens))]


def _plain(place: str, name: str, value: Any) -> Any:
    """The numbers of a tensor, or of each in a list; all else as it is."""
    if isinstance(value, list) and any(isinstance(one, torch.Tensor) for one in value):
        return [_plain(place, name, one) if isinstance(one, torch.Tensor) else one for one in value]
    if not isinstance(value, torch.Tensor):
        return value
    try:
        return numbers_of(value)
    except ValueError as error:  # a sparse one, or one whose numbers were not saved
        raise InputError(
            f"{place}: `{name:.40}` is a tensor without plain numbers ({error}); save it dense, on the CPU"
        ) from error
