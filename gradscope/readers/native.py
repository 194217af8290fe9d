"""The native rollout format: JSONL or parquet, a row per response, checked so that a mistake is named by its row."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from gradscope.batch import TokenBatch, collate
from gradscope.errors import InputError
from gradscope.models import Policy
from gradscope.readers.values import parse_ids, parse_response, show

COLUMNS = (
    "prompt_ids",
    "response_ids",
    "prompt",
    "response",
    "advantage",
    "reward",
    "group",
    "old_logprobs",
    "ref_logprobs",
    "response_mask",
    "temperature",
)
"""Columns with a meaning here; other columns are ignored."""

ALL_OR_NONE = ("advantage", "reward", "group", "old_logprobs", "ref_logprobs", "temperature")
"""Columns that every row must have as soon as one has it: a hole would silently change what is measured."""

ALIASES = {
    "mask": "response_mask",
    "loss_mask": "response_mask",
    "completion_mask": "response_mask",
    "completion": "response",
    "completion_ids": "response_ids",
    "output_ids": "response_ids",
    "logprobs": "old_logprobs",
    "sampling_logprobs": "old_logprobs",
    "reference_logprobs": "ref_logprobs",
    "temp": "temperature",
}
"""Names that others use for a column and that spelling alone does not give away."""

PARTNERS = {"prompt_ids": "prompt", "prompt": "prompt_ids", "response_ids": "response", "response": "response_ids"}

SUFFIXES = (".jsonl", ".json", ".parquet")


def read_native(path: Path, policy: Policy | None = None) -> TokenBatch:
    """Read native rollouts, right-padded.

    A row holds `prompt_ids` + `response_ids` (taken as they are, whatever text is beside them) or `prompt` +
    `response` (encoded by the policy; a chat goes through its template), then any of the columns of COLUMNS.
    null is "not given". Within `old_logprobs`, `ref_logprobs` and a list of `advantage`, null and NaN may stand where
    `response_mask` drops the token. Without `group`, identical prompts share one.
    """
    rows = list(_read_rows(Path(path)))
    if not rows:
        raise InputError(f"{path} holds no rows; give at least one response")
    _check_holes(rows)
    responses, groups = [], {}
    for place, row in rows:
        prompt_ids, response_ids = parse_ids(place, row, policy)
        key = row["group"] if "group" in row else tuple(prompt_ids)
        try:
            group = groups.setdefault(key, len(groups))
        except TypeError as error:
            raise InputError(f"{place}: `group` is {show(key)}; give a number or a string") from error
        responses.append(parse_response(place, row, prompt_ids, response_ids, group))
    return collate(responses)


def write_rollouts(path: str | Path, rows: Iterable[dict[str, Any]]) -> Path:
    """Write rows as JSONL or parquet, by the suffix; the file appears whole or not at all."""
    path = Path(path)
    _check_suffix(path)
    partial = path.with_name(f".{path.name}.partial")
    try:
        if path.suffix == ".parquet":
            _write_parquet(partial, list(rows))
        else:
            with partial.open("w", encoding="utf-8") as file:
                file.writelines(json.dumps(row, ensure_ascii=False, default=_plain) + "\n" for row in rows)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def _write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = list(dict.fromkeys(name for row in rows for name in row))
    pq.write_table(pa.table({name: [row.get(name) for row in rows] for name in names}), path)


def _read_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where the row is, its columns that are not null)."""
    _check_suffix(path)
    if not path.is_file():
        raise InputError(f"{path} is {'a folder' if path.is_dir() else 'not there'}; give a file of rollouts")
    for place, row in _read_parquet(path) if path.suffix == ".parquet" else _read_jsonl(path):
        row = {name: value for name, value in row.items() if value is not None}
        _check_names(place, row)
        yield place, row


def _read_jsonl(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    index = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            place = f"{path}, row {index} (line {number})"
            try:
                row = json.loads(line)
            except ValueError as error:  # UnicodeDecodeError is one too
                raise InputError(f"{place}: not JSON ({error}); write one object per line") from error
            if not isinstance(row, dict):
                raise InputError(f"{place}: a JSON {type(row).__name__}; write one object per line, {{column: value}}")
            yield place, row
            index += 1


def _read_parquet(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    index = 0
    try:
        for batch in pq.ParquetFile(path).iter_batches(batch_size=256):
            for row in batch.to_pylist():  # plain lists and None, where pandas gives arrays and NaN
                yield f"{path}, row {index}", row
                index += 1
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path} cannot be read as parquet ({str(error).splitlines()[0]}); write it again") from error


def _check_suffix(path: Path) -> None:
    if path.suffix not in SUFFIXES:
        ending = f"ends in {path.suffix!r}" if path.suffix else "has no suffix"
        raise InputError(f"{path} {ending}; rollouts are {', '.join(SUFFIXES)} files")


def _check_names(place: str, row: dict[str, Any]) -> None:
    """Refuse a name that means a column the row does not have; beside that column, it is a user's own."""
    for name in sorted(row.keys() - set(COLUMNS)):
        plain = name.lower().replace("log_prob", "logprob")
        close = [ALIASES[plain]] if plain in ALIASES else get_close_matches(plain, COLUMNS, n=1, cutoff=0.87)
        if close and close[0] not in row and PARTNERS.get(close[0]) not in row:
            raise InputError(f"{place}: unknown column {name!r}; did you mean {close[0]!r}? Rename it, or leave it out")


def _check_holes(rows: list[tuple[str, dict[str, Any]]]) -> None:
    for name in ALL_OR_NONE:
        having = [name in row for _, row in rows]
        if any(having) and not all(having):
            missing = having.index(False)
            raise InputError(
                f"{rows[missing][0]}: no {name!r}, which {sum(having)} of the {len(rows)} rows have; give it in every "
                "row, or in none"
            )


def _plain(value: Any) -> Any:
    """What JSON can hold of a tensor, an array or a number of numpy."""
    return value.tolist()
