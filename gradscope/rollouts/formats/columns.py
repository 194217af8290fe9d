"""The one reader of formats: it finds a format's columns in a record and makes a row of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from gradscope.errors import InputError, show
from gradscope.policy import Policy
from gradscope.rollouts.files import Record
from gradscope.rollouts.formats.base import MASKED_OUT, Column, Format, Row, need, whole_number
from gradscope.rollouts.formats.text import read_prompt, read_response
from gradscope.runs import parse_json

OTHER_PARTS = (
    "tokens outside the policy gradient (cut off, or in another term of the loss, such as cross-entropy or "
    "distillation) are dropped"
)
WEIGHTED = "the trainer weights tokens in the policy gradient: each advantage is multiplied by its token's weight"
WEIGHTED_TEACHER = (
    "the trainer weights tokens in the distillation by other numbers than 1, which are not in their weights here"
)
PER_RESPONSE = frozenset(("step", "reward", "group", "temperature", "chat_template_kwargs", "loss_scale", "length"))
"""Columns of a sequence that have no entry per token."""


def read_rows(form: Format, records: Iterable[Record], _policy: Policy | None = None) -> Iterator[Row]:
    """Yield the rows of a format that its columns describe."""
    for record in records:
        for own in split_lists(form, record) if form.is_lists else (record,):
            yield read_row(form, own)


def read_row(form: Format, record: Record, told: Mapping[str, Any] | None = None) -> Row:
    """Return a record's row. told: columns that are known otherwise, maybe also `step`."""
    told = dict(told or {})
    found, labels = _find(form.columns, record)
    name, remarks = labels.get("step", "step"), ()
    if form.step_in is not None and (named := re.search(form.step_in, record.path.name)):
        found["step"] = named[1]
    step = whole_number(replace(record, columns={name: found.pop("step", None)}), name)
    if (reason := next((reason for reason, holds in form.left_out if holds(record)), None)) is not None:
        return Row(record.place, {}, step, left_out=reason)
    if form.has_parts:
        known = {column.place for column in form.columns}
        parts = {n: v for n, v in record.columns.items() if n not in known and isinstance(v, int | float)}
        found |= {"reward_parts": parts} if parts else {}
    chats = {column.place for column in form.columns if column.kind == "chat"}
    for name, read in (("prompt", read_prompt), ("response", read_response)):
        if name in found and f"{name}_ids" not in found:
            is_chat, place = labels[name] in chats, f"{record.place}: `{labels[name]}`"
            found[name], said = read(found[name], place, is_chat=is_chat, opens_turn=form.opens_turn)
            remarks += said
    remarks += tuple(remark for remark, holds in form.remarks if holds(record))
    about = {"loss": record.loss, "path": record.path, "remarks": remarks}
    row = Row(record.place, found | told, told.pop("step", step), labels, **about)
    row.columns.pop("step", None)
    return _split_sequence(form, record, row) if any(column.name == "ids" for column in form.columns) else row


def _find(columns: Iterable[Column], record: Record) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a record's columns by their native names, and the place of each name."""
    found, first = {}, {column.name: column.place for column in reversed([*columns])}
    labels = dict(first)
    for column in columns:
        if column.name not in found and (value := dig(record.columns, column.place)) is not None:
            found[column.name], labels[column.name] = value, column.place
    if first.get("old_logprobs") != labels.get("old_logprobs") == labels.get("sampler_logprobs"):
        del found["sampler_logprobs"]  # the only log-probabilities stand in for the trainer's own
    return found, labels


def dig(columns: Any, path: str) -> Any:
    """Return what stands at a path, in objects or their JSON, or in the first of a list that has it; else None.

    >>> dig({"a": '{"b": {"c": 1}}', "d.e": 2}, "a.b.c"), dig({"d.e": 2}, "d.e"), dig({"a": [1, {"b": 2}]}, "a.b")
    (1, 2, 2)
    """
    if isinstance(columns, str):
        with suppress(ValueError):
            columns = parse_json(columns)
    if isinstance(columns, list):
        return next((found for one in columns if (found := dig(one, path)) is not None), None)
    if not isinstance(columns, dict) or path in columns:
        return columns.get(path) if isinstance(columns, dict) else None
    first, _, rest = path.partition(".")
    return dig(columns.get(first), rest) if rest else None


def split_lists(form: Format, record: Record) -> Iterator[Record]:
    """Split a dictionary of lists into records without nulls."""
    needs = [column.place for column in form.columns if column.required]
    for name in needs:
        if not isinstance(record.columns.get(name), list):
            raise InputError(f"{record.place}: `{name}` is not a list; a line of this format has one list per column")
    length = len(record.columns[needs[0]])
    names = dict.fromkeys([*needs, *(column.place.split(".")[0] for column in form.columns)])
    read = {name: record.columns[name] for name in names if name in record.columns}
    for name, value in read.items():
        if isinstance(value, list) and len(value) != length:
            raise InputError(
                f"{record.place}: `{name}` has {len(value)} entries, `{needs[0]}` {length}; each list needs one per "
                "response"
            )
    for index in range(length):
        own = {name: v[index] if isinstance(v, list) else v for name, v in read.items()}
        known = {name: v for name, v in own.items() if v is not None}
        yield replace(record, place=f"{record.place}, entry {index}", columns=known)


def _split_sequence(form: Format, record: Record, row: Row) -> Row:
    """Split a sequence of ids into prompt and response, which starts at the first token kept by the mask.

    A column with an entry per token is omitted if all of them are null, a single number is kept as it is; `length` is
    the number of tokens before padding starts, `weight` is 0 for tokens of other terms of the loss. Where there are
    only `distilled` weights, these count, and the reference is the teacher.
    """
    for name in ("ids", "mask"):
        need(record, row.labels[name])
    found = dict(row.columns)
    if isinstance(none := found.get("distilled"), list) and not any(none):
        del found["distilled"]
    each = {n: v for n, v in found.items() if n not in PER_RESPONSE and (isinstance(v, list) or n != "advantage")}
    count = len(each["ids"]) if isinstance(each["ids"], list) else 0
    for name, values in each.items():
        if not isinstance(values, list):
            raise InputError(
                f"{row.place}: `{row.label(name)}` is {show(values)}; give a list with one entry per token"
            )
        if len(values) != count:
            raise InputError(
                f"{row.place}: `{row.label(name)}` has {len(values)} entries for {count} tokens; give one each"
            )
    end = count
    if "length" in found:
        end = whole_number(Record(record.path, row.place, {"length": found.pop("length")}), "length")
        if not 0 < end <= count:
            raise InputError(f"{row.place}: the length is {end} for {count} tokens; give 1 to {count}")
    others = {name: value for name, value in found.items() if name not in each}
    kept, remarks = each["mask"][:end], row.remarks
    is_rewarded = _any_known(each.get("advantage", ())) and any(v is None or v for v in each.get("weight", [1]))
    if "distilled" in each and not is_rewarded:
        each = {"ref_logprobs": [None] * count} | each | {"weight": [v or 0 for v in each["distilled"]]}
        each["teacher_logprobs"] = each.pop("ref_logprobs")
        each.pop("advantage", None)
        row = replace(row, loss=form.distilled if row.loss is None else row.loss)
        remarks += (WEIGHTED_TEACHER,) if any(v not in (0, 1, None) for v in each["weight"]) else ()
    each.pop("distilled", None)
    weight = each.get("weight", [])[:end]
    if any(value is not None for value in weight):
        own = [keep if value is None or value else 0 for keep, value in zip(kept, weight, strict=True)]
        remarks += (OTHER_PARTS,) if own != kept else ()
        kept = own
    if 1 not in kept:
        return replace(row, columns=others, left_out=MASKED_OUT)
    start = kept.index(1)
    cut = {"prompt_ids": each.pop("ids")[:start], "response_ids": found["ids"][start:end]}
    cut["response_mask"] = kept[start:]
    each.pop("mask")
    own = {name: values[start:end] for name, values in each.items()}
    cut |= {name: values for name, values in own.items() if _any_known(values)}
    scale = [1.0 if value is None else value for value in cut.pop("weight", [])]
    if "advantage" in cut and any(keep and one != 1 for keep, one in zip(cut["response_mask"], scale, strict=False)):
        cut["advantage"] = _scaled(cut["advantage"], scale)
        remarks += (WEIGHTED,)
    ids, mask = row.label("ids"), row.label("mask")
    labels = {**row.labels, "prompt_ids": ids, "response_ids": ids, "response_mask": mask}
    return replace(row, columns=cut | others, labels=labels, remarks=remarks)


def _any_known(values: Iterable[Any]) -> bool:
    return any(value is not None for value in values)


def _scaled(values: list[Any], weights: list[Any]) -> list[Any]:
    """Multiply each value by its weight; non-numbers stay for the reader to report."""
    number = int | float
    return [
        v * w if isinstance(v, number) and isinstance(w, number) else v for v, w in zip(values, weights, strict=True)
    ]
