"""The native rollout format: JSONL or parquet with a row per response; errors name the row."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any

from gradscope.errors import InputError, checked
from gradscope.policy import Policy
from gradscope.rollouts.batch import TokenBatch
from gradscope.rollouts.files import LOSS_KEY, STEPS, Record, check_suffix, loss_file
from gradscope.rollouts.formats.base import Column, Format, Row
from gradscope.rollouts.formats.columns import read_row
from gradscope.runs import replacing, write_json

COLUMNS = (
    *("prompt_ids", "response_ids", "prompt", "response", "advantage", "reward", "group", "temperature"),
    *("response_mask", "old_logprobs", "ref_logprobs", "sampler_logprobs", "teacher_logprobs"),
    *("teacher_top_ids", "teacher_top_logprobs"),
)
"""Known columns, whose near misses are reported; other columns are ignored."""

MORE = (
    *("step", "chat_template_kwargs", "group_reward_mean", "group_reward_std"),
    *("loss_scale", "sampler_correction", "process", "micro_batch", "grad_norm", "reward_parts"),
    *("pair", "chosen", "z0"),
)
"""Further known columns, whose near misses may be a user's own columns."""

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
    "teacher_log_probs": "teacher_logprobs",
    "temp": "temperature",
}
"""Other common names of a column that differ in more than spelling."""

PARTNERS = {"prompt_ids": "prompt", "prompt": "prompt_ids", "response_ids": "response", "response": "response_ids"}
"""Columns that make up for each other."""

SUFFIXES = (".jsonl", ".json", ".parquet")
"""File suffixes for writing native rollouts."""


def is_native(names: Collection[str]) -> bool:
    """Return whether these columns determine a native row's ids, each part from ids or from text."""
    return all({part, f"{part}_ids"} & {*names} for part in ("prompt", "response"))


def count_columns(names: Iterable[str]) -> int:
    """Count the known columns, including near misses."""
    return sum(name in COLUMNS or _meant(name) is not None for name in names)


def _rows(records: Iterable[Record], policy: Policy | None) -> Iterator[Row]:
    for record in records:
        _check_names(record.place, record.columns)
        yield read_row(NATIVE, record)


NATIVE = Format(
    "native",
    (*(Column(name) for name in (*COLUMNS, *MORE) if name != "step"), *(Column("step", name) for name in STEPS)),
    _rows,
    opens_turn=False,
)
"""A row holds `prompt_ids` (used as they are) or `prompt` (encoded by the policy, chats through its template),
`response_ids` or `response`, ids beating text (and refused if most rows' text disagrees), and any of COLUMNS and MORE.
null, NaN and infinity mean unknown, and entries at tokens dropped by `response_mask` are ignored. Without `group`,
identical prompts of a step form a group."""


@checked
def write_rollouts(
    path: str | Path, rows: TokenBatch | Iterable[dict[str, Any]], *, loss: Mapping[str, Any] | None = None
) -> Path:
    """Write rows or a batch atomically as JSONL or parquet, depending on the suffix.

    loss: settings of the training loss, fields of `LossSettings` by name. They are stored in the parquet file's
    metadata, or in FILE.loss next to a JSONL file, and the commands measure with them.
    """
    path, rows = Path(path), rows.rows() if isinstance(rows, TokenBatch) else rows
    check_suffix(path, SUFFIXES, "rollouts are written as")
    with replacing(path) as partial:
        if path.suffix == ".parquet":
            _write_parquet(partial, list(rows), loss)
        else:
            with partial.open("w", encoding="utf-8") as file:
                lines = (json.dumps(row, ensure_ascii=False, default=lambda value: value.tolist()) for row in rows)
                file.writelines(f"{line}\n" for line in lines)
    if path.suffix != ".parquet":
        if loss is None:
            loss_file(path).unlink(missing_ok=True)  # from earlier rows
        else:
            write_json(loss_file(path), dict(loss))
    return path


def _write_parquet(path: Path, rows: list[dict[str, Any]], loss: Mapping[str, Any] | None) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = list(dict.fromkeys(name for row in rows for name in row))
    table = pa.table({name: [row.get(name) for row in rows] for name in names})
    pq.write_table(table if loss is None else table.replace_schema_metadata({LOSS_KEY: json.dumps(dict(loss))}), path)


def _check_names(place: str, row: dict[str, Any]) -> None:
    """Raise InputError for a near miss of a missing column; other unknown names are the user's own."""
    for name in sorted(row.keys() - set(COLUMNS)):
        meant = _meant(name)
        if meant is not None and meant not in row and PARTNERS.get(meant) not in row:
            raise InputError(f"{place}: unknown column {name!r}; did you mean {meant!r}? Rename it, or leave it out")


@lru_cache(maxsize=10_000)
def _meant(name: str) -> str | None:
    """Return the column of which this name is a near miss."""
    plain = name.lower().replace("log_prob", "logprob")
    close = [ALIASES[plain]] if plain in ALIASES else get_close_matches(plain, COLUMNS, n=1, cutoff=0.87)
    return close[0] if close else None
