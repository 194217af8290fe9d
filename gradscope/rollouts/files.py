"""The files of a log, whatever trainer wrote them: which there are, and their records with the place of each."""

from __future__ import annotations

import hashlib
import io
import json
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from gradscope.errors import BROKEN_FILE, InputError, unpickling_reason
from gradscope.runs import file_hash

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


def list_files(path: Path) -> list[Path]:
    """The file itself, or those of a folder: its own, else those of its step_N folders; numbers in order of size.

    Of a folder with annotations/ (prime-rl's traces) these, and its stream.
    """
    if path.is_file():
        _check_suffix(path)
        return [path]
    if not path.is_dir():
        raise InputError(f"{path} is not there; give a file of rollouts, or a folder of rollout files")
    traces = ("annotations/**/*", "stream*", "stream*/*") if (path / "annotations").is_dir() else ()
    for patterns in (traces, ("*",), ("step_*/*",)):
        found = {file for pattern in patterns for file in path.glob(pattern)}
        files = [f for f in found if f.is_file() and f.suffix in IN_FOLDERS and f.name[0] != "."]
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


def read_records(path: Path) -> Iterator[Record]:
    """Every record of one file, in order."""
    read = {".parquet": _read_parquet, ".pt": _read_tensors}.get(path.suffix, _read_jsonl)
    for place, columns in read(path):
        yield Record(path, place, {name: value for name, value in columns.items() if value is not None})


def _natural_key(path: Path) -> list[Any]:
    """step_2 before step_10: split at numbers, which compare as such."""
    return [int(part) if place % 2 else part for place, part in enumerate(re.split(r"([0-9]+)", str(path)))]


def _check_suffix(path: Path) -> None:
    if path.suffix not in SUFFIXES:
        ending = f"ends in {path.suffix!r}" if path.suffix else "has no suffix"
        raise InputError(f"{path} {ending}; rollouts are {', '.join(SUFFIXES)} files")


def _read_jsonl(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    index = 0
    with _open_lines(path) as file:
        for number, line in enumerate(_lines(path, file), start=1):
            if not line.strip():
                continue
            place = f"{path}, row {index} (line {number})"
            try:
                row = json.loads(line, object_pairs_hook=_object)
            except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError too
                raise InputError(f"{place}: not JSON ({error}); write one object per line") from error
            if not isinstance(row, dict):
                raise InputError(f"{place}: a JSON {type(row).__name__}; write one object per line, {{column: value}}")
            yield place, row
            index += 1


def _open_lines(path: Path) -> BinaryIO:
    """The bytes of a file, or what is compressed in it."""
    if path.suffix != ".zst":
        return path.open("rb")
    import pyarrow as pa

    return io.BufferedReader(pa.input_stream(str(path), compression="zstd"))


def _lines(path: Path, file: BinaryIO) -> Iterator[bytes]:
    try:
        yield from file
    except OSError as error:
        raise InputError(f"{path} cannot be read ({str(error).splitlines()[0]}); give a sound file") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; ValueError for a name that stands there twice, where json would take the last."""
    found = dict(pairs)
    if len(found) < len(pairs):
        name = next(name for name, n in Counter(name for name, _ in pairs).items() if n > 1)
        raise ValueError(f"{name!r:.60} stands there twice")
    return found


def _read_parquet(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    index = 0
    try:
        file = pq.ParquetFile(path)
        names = file.schema_arrow.names
        if twice := [name for name, n in Counter(names).items() if n > 1]:
            raise InputError(f"{path} has the column {twice[0]!r:.60} twice; write it again with one of them")
        for batch in file.iter_batches(batch_size=256):
            for row in batch.to_pylist():  # plain lists and None, where pandas gives arrays and NaN
                yield f"{path}, row {index}", row
                index += 1
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path} cannot be read as parquet ({str(error).splitlines()[0]}); write it again") from error


def _read_tensors(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The samples of a file that torch saved; weights_only: nothing in it is run."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a pickle of an odd protocol: what fails is said below
            content = torch.load(path, map_location="cpu", weights_only=True)
    except BROKEN_FILE as error:  # UnpicklingError for whatever is more than numbers, strings and containers
        raise InputError(
            f"{path} cannot be read as tensors and plain values ({unpickling_reason(error)}); nothing in it was run; "
            "give a file without pickled objects"
        ) from error
    samples = content.get("samples", _split_columns(content)) if isinstance(content, dict) else None
    if not isinstance(samples, list) or not all(isinstance(sample, dict) for sample in samples):
        keys = ", ".join(map(str, content)) if isinstance(content, dict) else type(content).__name__
        raise InputError(
            f"{path} holds no list `samples` but {keys:.80}; give debug rollout or train data of slime or miles"
        )
    shared = {"rollout_id": content.get("rollout_id")}
    for index, sample in enumerate(samples):
        place = f"{path}, sample {index}"
        plain = {name: _plain(place, name, v) for name, v in sample.items()}
        yield place, shared | {name: v for name, v in plain.items() if v is not None}


def _split_columns(content: dict[str, Any]) -> list[dict[str, Any]] | None:
    """The samples of train data that hold a list per column, by the names of those that hold one per sample.

    Only columns with an entry for each sample; `raw_reward` is left out, for it is of all ranks, in another order.
    """
    data = content.get("rollout_data")
    tokens = data.get("tokens") if isinstance(data, dict) else None
    if not isinstance(tokens, list):
        return None
    lists = {str(name): v.tolist() if isinstance(v, torch.Tensor) and v.dim() == 1 else v for name, v in data.items()}
    lists = {SINGULAR.get(n, n): v for n, v in lists.items() if isinstance(v, list) and len(v) == len(tokens)}
    lists = {name: values for name, values in lists.items() if name != "raw_reward"}
    return [{name: values[index] for name, values in lists.items()} for index in range(len(tokens))]


def _plain(place: str, name: str, value: Any) -> Any:
    """The numbers of a tensor; all else as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    try:
        return value.tolist()
    except BROKEN_FILE as error:  # a sparse one, or one whose numbers were not saved
        raise InputError(f"{place}: `{name}` is a tensor without plain numbers; save it dense, on the CPU") from error
