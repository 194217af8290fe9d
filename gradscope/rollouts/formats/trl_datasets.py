"""TRL's datasets for SFT, preferences and KTO, with ids and masks as TRL 1.16's trainers make them.

TRL tokenizes prompt and completion together; the completion starts where these ids part from those of the prompt alone,
opened for an answer. Plain text gets the end-of-sequence token, unless it ends with it; a chat only what its template
puts in. A pair's prompt is what both of its sides share with the prompt alone. Sequences are cut at `max_length`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from random import Random
from typing import Any

from gradscope.errors import InputError, show
from gradscope.policy import Policy
from gradscope.rollouts.files import Record
from gradscope.rollouts.formats.base import Column, Format, Row, need
from gradscope.rollouts.formats.text import without_nulls
from gradscope.runs import parse_json

MEDIA = frozenset({"image", "images", "video", "videos", "audio"})
WITH_MEDIA = "they hold images, video or sound"
EVERY_TOKEN = (
    "all tokens of their text count, those of prompts and template, too, as TRL counts them by default "
    "(assistant_only_loss=true: only the assistant's)"
)
NOT_DRAWN = "these were not drawn ({} rows are, at random; rows=N draws another number)"
CUT_SHORT = (
    "they are cut at {} tokens, TRL's max_length unless set (max_length=N cuts elsewhere, max_length=none nowhere)"
)
UNLIKE_PROMPT = (
    "TRL trains them after another context than their prompt: tokens at its end merge with the completion's, or the "
    "template renders it otherwise when an answer follows"
)
ROLLOUTS = frozenset(("advantage", "advantages", "reward", "rewards", "score", "old_logprobs", "logprobs", "response"))
"""Columns of rollouts, which no dataset has."""


@dataclass(frozen=True)
class Settings:
    """Settings of TRL's trainers, by their names there; and how many rows to read."""

    max_length: int | None = 1024
    completion_only_loss: bool = True
    assistant_only_loss: bool = False
    dataset_text_field: str = "text"
    rows: int | None = 1024
    """Most rows to read, drawn at random from larger datasets."""


def _sft_rows(records: Iterable[Record], _policy: Policy | None, settings: Settings) -> Iterator[Row]:
    field = settings.dataset_text_field
    for record in _draw(records, settings):
        if not isinstance(record, Record):
            yield record
        elif "prompt" in record.columns:
            prompt, completion = _read(record, "prompt"), _read(record, "completion")
            row = _row(record, settings, prompt, completion, **_grouped(prompt))
            yield row if settings.completion_only_loss else replace(row, remarks=(*row.remarks, EVERY_TOKEN))
        else:
            text = _read(record, "messages" if "messages" in record.columns else field)
            row = _row(record, settings, None, text, **_grouped(record.place))
            every = isinstance(text, str) or not settings.assistant_only_loss
            yield replace(row, remarks=(*row.remarks, EVERY_TOKEN)) if every else row


def _pair_rows(records: Iterable[Record], _policy: Policy | None, settings: Settings) -> Iterator[Row]:
    for number, record in enumerate(_draw(records, settings)):
        if not isinstance(record, Record):
            yield record
            continue
        prompt, *sides = _read_pair(record)
        for chosen, side, other in ((1, *sides), (0, *reversed(sides))):
            row = _row(record, settings, prompt, side, other, pair=number, chosen=chosen)
            yield replace(row, place=f"{record.place}, {'chosen' if chosen else 'rejected'}")


def _kto_rows(records: Iterable[Record], _policy: Policy | None, settings: Settings) -> Iterator[Row]:
    for record in _draw(records, settings):
        if not isinstance(record, Record):
            yield record
        elif "chosen" in record.columns:
            prompt, *sides = _read_pair(record)
            yield from (_row(record, settings, prompt, own, chosen=1 - n) for n, own in enumerate(sides))
        else:
            prompt, completion = _read(record, "prompt"), _read(record, "completion")
            yield _row(record, settings, prompt, completion, chosen=int(bool(need(record, "label"))))


def _draw(records: Iterable[Record], settings: Settings) -> Iterator[Record | Row]:
    """Yield at most `settings.rows` records, always the same of a file, and a row for each that is left out."""
    drawn, random, count = [], Random(0), 0
    for count, record in enumerate(records, 1):
        if settings.rows is None or len(drawn) < settings.rows:
            drawn.append((count, record))
        elif (place := random.randrange(count)) < settings.rows:
            drawn[place] = (count, record)
    for _, record in sorted(drawn, key=lambda one: one[0]):
        yield Row(record.place, {}, left_out=WITH_MEDIA) if MEDIA & record.columns.keys() else record
    yield from (Row("", {}, left_out=NOT_DRAWN.format(settings.rows)) for _ in range(count - len(drawn)))


def _row(record: Record, settings: Settings, prompt: Any, text: Any, other: Any = None, **columns: Any) -> Row:
    """Return the row of a completion, or of a whole text without a prompt. other: the pair's other side."""
    if len({type(own) for own in (prompt, text, other) if own is not None}) > 1:
        raise InputError(f"{record.place}: it holds strings and chats; give all of its columns as one of the two")
    tools = record.columns.get("tools")
    try:
        tools = parse_json(tools) if isinstance(tools, str) else tools
    except ValueError as error:
        raise InputError(f"{record.place}: `tools` is no JSON ({error}); give a list of tools") from error
    columns |= {"prompt": text if prompt is None else prompt}
    if "chat_template_kwargs" in record.columns:
        columns["chat_template_kwargs"] = record.columns["chat_template_kwargs"]
    given = {"prompt": prompt, "text": text, "other": other, "tools": tools, "settings": settings}
    return Row(record.place, columns, loss=record.loss, path=record.path, encode=partial(_encode, **given))


def _encode(
    policy: Policy, template: Mapping[str, Any], *, prompt: Any, text: Any, other: Any, tools: Any, settings: Settings
) -> dict[str, Any]:
    """Return ids and mask of one sequence, as TRL makes them; see `Row.encode`."""

    def encode(chat: Any, **how: bool) -> tuple[list[int], list[int] | None]:
        return policy.encode_whole(chat, tools=tools, chat_template_kwargs=template, **how)

    eos = policy.tokenizer.eos_token or ""
    text, other = (
        own + eos if isinstance(own, str) and not own.endswith(eos) else own for own in (text, other)
    )  # a string without an end ends with ""
    ids, marks = encode(text if prompt is None else prompt + text, assistant=settings.assistant_only_loss)
    start, remarks = 0, ()
    if prompt is not None and settings.completion_only_loss:
        opened = encode(prompt, opened=True)[0]
        sides = [ids] if other is None else [ids, encode(prompt + other)[0]]
        start = min(_shared(opened, side) for side in sides)
        remarks = (UNLIKE_PROMPT,) if start < len(opened) else ()
    mask = [place >= max(start, 1) and (marks is None or bool(marks[place])) for place in range(len(ids))]
    if settings.max_length is not None and len(ids) > settings.max_length:
        remarks += (CUT_SHORT.format(settings.max_length),)
    ids, mask = ids[: settings.max_length], mask[: settings.max_length]
    begin = mask.index(True) if True in mask else len(mask)
    found = {"prompt_ids": ids[:begin], "response_ids": ids[begin:], "response_mask": mask[begin:]}
    return found | {"remarks": remarks}


def _shared(ids: list[int], others: list[int]) -> int:
    """Return the length of the common prefix."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ids, others, strict=False)))


def _read(record: Record, name: str) -> Any:
    """Return a string, or a chat without nulls from parquet."""
    value = need(record, name)
    if not (isinstance(value, str) or (isinstance(value, list) and value)):
        raise InputError(f"{record.place}: `{name}` is {show(value)}; give a string or a chat ([{{role, content}}, …])")
    return value if isinstance(value, str) else without_nulls(value)


def _read_pair(record: Record) -> tuple[Any, Any, Any]:
    """Return prompt, chosen and rejected; without a prompt, it is what both sides begin with, as TRL takes it."""
    sides = [_read(record, name) for name in ("chosen", "rejected")]
    if "prompt" in record.columns:
        return _read(record, "prompt"), *sides
    end = _shared(*sides)
    # A side that is the other's beginning keeps its last part; a blank before the sides part belongs to them.
    end -= end == min(map(len, sides)) or (end > 0 and sides[0][end - 1] == " ")
    return sides[0][:end], sides[0][end:], sides[1][end:]


def _grouped(prompt: Any) -> dict[str, str]:
    return {"group": prompt if isinstance(prompt, str) else repr(prompt)}


def _make(name: str, **given: Any) -> Format:
    """Return the format of this name under settings of `Settings`."""
    settings, made_by = replace(Settings(), **given), partial(_make, name)
    rows, loss, columns, beside = KINDS[name]
    return Format(
        name,
        tuple(Column(own) for own in columns),
        partial(rows, settings=settings),
        beside=beside,
        unlike=ROLLOUTS,
        loss={"weighting": loss},
        make=made_by,
        settings=Settings,
        notes=(f"ids and masks are made of the text as TRL 1.16's trainers make them ({name})",),
    )


KINDS = {
    "trl_preference": (
        _pair_rows, "dpo", ("prompt", "chosen", "rejected", "tools", "chat_template_kwargs"),
        (frozenset({"chosen", "rejected"}),),
    ),
    "trl_kto": (
        _kto_rows, "kto", ("prompt", "completion", "label", "tools", "chat_template_kwargs"),
        (frozenset({"prompt", "completion", "label"}),),
    ),
    "trl_sft": (
        _sft_rows, "sft", ("prompt", "completion", "messages", "text", "tools", "chat_template_kwargs"),
        (frozenset({"prompt", "completion"}), frozenset({"messages"}), frozenset({"text"})),
    ),
}  # fmt: skip
"""Format → its rows, the loss that such data is for, its columns, and those that tell it."""
TRL_PREFERENCE, TRL_KTO, TRL_SFT = map(_make, KINDS)
