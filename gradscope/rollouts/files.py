"""The files of a log from any trainer, and their records with their locations."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from gradscope.errors import InputError, show
from gradscope.rollouts.trained_run import Precision, TrainedRun
from gradscope.runs import (
    PACKED,
    file_hash,
    parquet_metadata,
    parse_json,
    read_arrow,
    read_json,
    read_lines,
    read_parquet,
)

SUFFIXES = (".jsonl", ".json", ".parquet", ".arrow", ".pt", ".pkl", *PACKED)
"""Suffixes of rollout files; .json is read as .jsonl, and .jsonl.zst and .jsonl.gz are decompressed."""

IN_FOLDERS = (".jsonl", ".parquet", ".pt", ".pkl", *PACKED)
"""Suffixes read from a folder; not .json, since trainers write a metadata.json."""

EPISODE = "episode_*.json"
"""Pattern of rLLM's files, which are also read from a folder."""

LOSS_KEY = b"gradscope.loss"
"""Key of the loss settings, a JSON object, in a parquet file's schema metadata."""
RUN_KEY = b"gradscope.run"
"""Key of a TrainedRun's fields, a JSON object, in a parquet file's schema metadata."""

STEPS = ("step", "global_step", "training_step", "train_step")
"""Names of the training-step column."""
NAMED = re.compile(r"(?:.*[^a-z])?(?:step|iter|iteration)[-_=]?([0-9]{1,18})(?![0-9])", re.IGNORECASE)
"""Pattern of file and folder names that contain a training step."""

DETAILS = ("rollout_data", "train_data")
"""Folders that form one log of slime's or miles's --dump-details."""


@dataclass(frozen=True)
class Record:
    """A row of a file, without its nulls."""

    path: Path
    place: str
    """File, row and line, for error messages."""
    columns: dict[str, Any]
    nulls: frozenset[str] = frozenset()
    """Names of columns that are null."""
    torn: bool = False
    """Whether this is an incomplete last line, with unknown contents."""
    loss: dict[str, Any] | None = None
    """Settings of the training loss, if the file has them."""


def list_files(path: Path) -> list[Path]:
    """List a log's files: the file itself, a folder's files, or those of its step_N folders, sorted numerically.

    For a folder with annotations/ (prime-rl's traces): these and its stream; with DETAILS: their contents.
    """
    if os.path.isfile(path):  # of a name that is too long, Path raises
        check_suffix(path, SUFFIXES, "rollouts are")
        return [path]
    if not os.path.isdir(path):
        raise InputError(f"{path} does not exist; give a file of rollouts, or a folder of rollout files")
    if saved := _saved_dataset(path):
        return saved
    for patterns in _patterns(path):
        found = {file for pattern in patterns for file in path.glob(pattern)}
        files = [f for f in found if f.is_file() and (f.suffix in IN_FOLDERS or f.match(EPISODE)) and f.name[0] != "."]
        # If a run died while compressing a file, both versions exist.
        files = [f for f in files if f.suffix not in PACKED or f.with_suffix("") not in files]
        if files:
            return sorted(files, key=_natural_key)
    raise InputError(
        f"{path} is a folder without {', '.join(IN_FOLDERS)} files; give the folder that holds the rollouts"
    )


def _saved_dataset(path: Path) -> list[Path]:
    """Return the files of a dataset that `datasets` saved in this folder, of its split `train` if it has several."""
    if (splits := read_json(path / "dataset_dict.json")) is not None:
        path = path / "train"
        if not path.is_dir():
            raise InputError(f"{path} does not exist; give the folder of one split ({show(splits.get('splits'))})")
    told = (read_json(path / "state.json") or {}).get("_data_files")
    names = [file.get("filename") for file in told if isinstance(file, dict)] if isinstance(told, list) else []
    files = [path / Path(name).name for name in names if isinstance(name, str)]
    if missing := [file for file in files if not file.is_file()]:
        raise InputError(f"{missing[0]} does not exist, and {path / 'state.json'} names it; give the whole folder")
    return files


def _patterns(path: Path) -> Iterator[tuple[str, ...]]:
    """Yield the patterns of files in a folder, of which the first with any match counts."""
    if any((path / name).is_dir() for name in DETAILS):
        yield tuple(f"{name}/*" for name in DETAILS)
    if (path / "annotations").is_dir():
        yield "annotations/**/*", "stream*/*", "*"
    yield ("*",)
    yield "step_*/*", "step_*/annotations/*"
    yield ("[0-9]*/*",)  # AReaL: a folder per version of the weights
    yield (f"train_step_*/{EPISODE}",)
    for subset in ("effective", "all"):  # prime-rl's rollouts; trained ones are in both
        yield (f"step_*/train/{subset}/*",)
        yield (f"train/{subset}/*",)


def named_steps(files: Sequence[Path]) -> dict[Path, int]:
    """Return each file's training step from its or its folder's name, if all have one and they differ.

    >>> sorted(named_steps([Path("rollouts_step_1.jsonl"), Path("global_step_20/rollouts.jsonl")]).values())
    [1, 20]
    >>> named_steps([Path("run/step_3/rank_0.jsonl"), Path("run/step_3/rank_1.jsonl")])
    {}
    """
    found = {file: NAMED.search(file.stem) or NAMED.fullmatch(file.parent.name) for file in files}
    steps = {file: int(match[1]) for file, match in found.items() if match}
    return steps if len(steps) == len(files) and len({*steps.values()}) > 1 else {}


def rollouts_hash(path: Path) -> str:
    """Return the SHA-256 of a file, or of several files' names and contents in reading order, with loss settings."""
    files = [own for file in list_files(path) for own in (file, loss_file(file)) if own == file or own.is_file()]
    if files == [path]:
        return file_hash(path)
    root = path if path.is_dir() else path.parent
    return hashlib.sha256("".join(f"{f.relative_to(root)} {file_hash(f)}\n" for f in files).encode()).hexdigest()


def write_rows(rows: Any, folder: Path) -> Path:
    """Write rows, a DataFrame or mappings, into a file of this folder, and return its path."""
    if hasattr(rows, "to_parquet"):
        file = folder / "rows.parquet"
        rows.to_parquet(file, index=False)
        return file
    file = folder / "rows.jsonl"
    lines = (json.dumps(dict(row), default=lambda value: value.tolist()) for row in rows)
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return file


def read_records(
    path: Path, *, step: int | None = None, read: Callable[[Path], Iterator[tuple[str, dict[str, Any]]]] | None = None
) -> Iterator[Record]:
    """Yield the records of one file in order; an incomplete last line is a record that is torn.

    step: for records without one. read: yields each record's place and columns; None: JSON lines or parquet.
    """
    if read is not None:
        records = (Record(path, place, columns) for place, columns in read(path))
    elif path.suffix == ".parquet":
        records = (Record(path, f"{path}, row {index}", row) for index, row in enumerate(read_parquet(path)))
    elif path.suffix == ".arrow":
        records = (Record(path, f"{path}, row {index}", row) for index, row in enumerate(read_arrow(path)))
    else:
        records = _read_whole(path) if _is_indented(path) else _read_jsonl(path)
    loss = read_loss(path)
    for record in records:
        known = {name: value for name, value in record.columns.items() if value is not None}
        if step is not None and not record.torn and not known.keys() & set(STEPS):
            known["step"] = step
        yield replace(record, columns=known, nulls=frozenset(record.columns.keys() - known.keys()), loss=loss)


def loss_file(path: Path) -> Path:
    """Return the file with the loss settings of a JSONL file, FILE.loss."""
    return path.with_name(f"{path.name}.loss")


def read_loss(path: Path) -> dict[str, Any] | None:
    """Read the loss settings of a file's rows, if recorded: in parquet under LOSS_KEY, else in `loss_file`."""
    if path.suffix == ".parquet":
        return _read_settings(path, parquet_metadata(path).get(LOSS_KEY))
    return _read_settings(own, own.read_bytes()) if os.path.isfile(own := loss_file(path)) else None


def _read_settings(path: Path, told: bytes | None, what: str = "loss settings") -> dict[str, Any] | None:
    try:
        found = None if told is None else parse_json(told)
    except ValueError as error:
        raise InputError(f"{path}: the {what} are not JSON ({error}); leave them out") from error
    if told is not None and not isinstance(found, dict):
        raise InputError(f"{path}: the {what} are {show(found)}; give an object, {{setting: value}}")
    return found


def read_run(files: Iterable[Path]) -> TrainedRun:
    """Read what the first of a log's parquet files that has RUN_KEY says of the run; nothing if none has it.

    Raises InputError for an entry that is not a TrainedRun's fields.
    """
    told = ((file, parquet_metadata(file).get(RUN_KEY)) for file in files if file.suffix == ".parquet")
    file, entry = next(((file, entry) for file, entry in told if entry), (Path(), b"{}"))
    found = _read_settings(file, entry, "facts of the run")
    kinds = {"trained": list, "frozen": list, "left_out": list, "other_loss": str, "precision": str}
    for name, kind in kinds.items():
        value = found.get(name)
        is_known = isinstance(value, kind) and (name != "precision" or value in get_args(Precision))
        if value is not None and not (is_known and all(isinstance(each, str) for each in value)):
            raise InputError(f"{file}: {RUN_KEY.decode()} has {name} {show(value)}; write it as RolloutWriter does")
    trained, frozen, left_out = (found.get(name) for name in ("trained", "frozen", "left_out"))
    trained = None if trained is None else frozenset(trained)
    known = frozenset(frozen or ()), found.get("other_loss"), tuple(sorted(left_out or ()))
    return TrainedRun(found.get("precision"), trained, *known)


def _natural_key(path: Path) -> list[Any]:
    """Return a sort key that puts step_2 before step_10."""
    return [int(part) if place % 2 else part for place, part in enumerate(re.split(r"([0-9]+)", str(path)))]


def check_suffix(path: Path, suffixes: Sequence[str], words: str) -> None:
    """Raise InputError for a file of another suffix. words: how its message goes on before the list of them."""
    if path.suffix not in suffixes:
        ending = f"ends in {path.suffix!r}" if path.suffix else "has no suffix"
        raise InputError(f"{path} {ending}; {words} {', '.join(suffixes)} files")


def _read_jsonl(path: Path) -> Iterator[Record]:
    index = 0
    for number, line in enumerate(read_lines(path), start=1):
        if not line.strip():
            continue
        place = f"{path}, row {index} (line {number})"
        try:
            row = parse_json(line)
        except ValueError as error:  # includes UnicodeDecodeError
            if not line.endswith(b"\n"):
                yield Record(path, place, {}, torn=True)
                return
            raise InputError(f"{place}: not JSON ({error}); write one object per line") from error
        if not isinstance(row, dict):
            raise InputError(f"{place}: a JSON {type(row).__name__}; write one object per line, {{column: value}}")
        yield Record(path, place, row)
        index += 1


def _is_indented(path: Path) -> bool:
    """Return whether a .json file is a single value over several lines rather than a row per line."""
    return path.suffix == ".json" and next(read_lines(path), b"").strip() in (b"{", b"[")


def _read_whole(path: Path) -> Iterator[Record]:
    try:
        content = parse_json(b"".join(read_lines(path)))
    except ValueError as error:
        raise InputError(f"{path}: not JSON ({error}); give a whole file, or write one object per line") from error
    for index, row in enumerate(content if isinstance(content, list) else [content]):
        if not isinstance(row, dict):
            raise InputError(f"{path}, row {index}: a JSON {type(row).__name__}; give a list of objects")
        yield Record(path, f"{path}, row {index}", row)
