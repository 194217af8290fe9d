"""ms-swift's completions.jsonl: a line per logging call, a dictionary of lists with an entry per completion.

Every logging call, and the end of training, writes the newest generation again. Evaluations are logged under the
current training step. Megatron numbers a generation by the steps completed before it (`gen_step`), the other trainers
by those completed after it (`step`). With Ray, each line is a single completion, with a reward but no advantage.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby
from typing import Any

from gradscope.errors import InputError
from gradscope.policy import Policy
from gradscope.rollouts.files import Record
from gradscope.rollouts.formats.base import (
    EVALUATED,
    MADE_AGAIN,
    RETOKENISED,
    Format,
    Row,
    optional,
    required,
    whole_number,
)
from gradscope.rollouts.formats.columns import read_row, split_lists

REPEATED = "an earlier line holds the same generation (ms-swift writes the newest one at every logging step)"
EVALUATION = "they are from an evaluation: the previous line is from training at the same step"
LAST_TURN = (
    "they had several turns (num_turns), but the log holds only the last: the tokens of earlier ones, which were also "
    "trained, are missing"
)
PLACEHOLDER = re.compile(r"\[(-?[0-9]{1,9}) \* ([0-9]{1,9})\]")
"""Placeholder for an image, a video or audio: a token id and a repeat count."""


def _rows(records: Iterable[Record], policy: Policy | None) -> Iterator[Row]:
    for _, file in groupby(records, key=lambda record: record.path):
        newest: list[tuple] = []
        before: int | None = None
        own = [*file]
        single = [isinstance(record.columns.get("prompt"), str) for record in own]  # with Ray
        pairs = zip(own, single, strict=True)
        lines = [[record] if alone else [*split_lists(MS_SWIFT, record)] for record, alone in pairs]
        steps = [_step(line[0]) if line else None for line in lines]
        again = _made_again(steps)
        for number, (line, step) in enumerate(zip(lines, steps, strict=True)):
            # Nothing is trained on before the first step.
            whole = MADE_AGAIN if number in again else EVALUATED if step == 0 else None
            if whole or single[number]:
                yield from (_row(entry, whole, policy) for entry in line)
                continue
            content = [tuple(str(entry.columns.get(name)) for name in MS_SWIFT.needs) for entry in line]
            common = min(len(content), len(newest))
            left_out = [REPEATED] * common if content[:common] == newest[:common] else []
            if not left_out and step is not None and step == before and newest:
                left_out = [EVALUATION] * len(line)
            elif len(content) > len(left_out):
                newest = content
            before = step
            for place, entry in enumerate(line):
                yield _row(entry, left_out[place] if place < len(left_out) else None, policy)


def _made_again(steps: list[int | None]) -> set[int]:
    """Return the indices of lines whose steps a resumed run logged again later."""
    again, before = set(), None
    for number, step in enumerate(steps):
        if None not in (step, before) and step < before:
            again |= {at for at, earlier in enumerate(steps[:number]) if earlier is not None and earlier >= step}
        before = before if step is None else step
    return again


def _step(record: Record) -> int | None:
    taken = whole_number(record, "gen_step")
    return whole_number(record, "step") if taken is None else taken + 1


def _row(record: Record, left_out: str | None, policy: Policy | None) -> Row:
    if not {"prompt", "completion"} <= record.columns.keys():
        return Row(record.place, {}, left_out="the entry has no prompt or no completion")
    row = read_row(MS_SWIFT, record, {"step": _step(record)})
    turns, _ = row.columns.pop("num_turns", None), row.columns.pop("gen_step", None)
    _check_is_text(record.place, row.columns["prompt"], policy)
    remarks = (LAST_TURN,) if isinstance(turns, (int, float)) and turns > 1 else ()
    return replace(row, left_out=left_out, remarks=row.remarks + remarks)


def _check_is_text(place: str, prompt: Any, policy: Policy | None) -> None:
    """Raise InputError if the prompt contains an image, video or audio, which the log holds only as a placeholder."""
    tokenizer = policy.tokenizer if policy else None
    if tokenizer is None or not isinstance(prompt, str):
        return
    usual = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    for found in PLACEHOLDER.finditer(prompt):
        token = int(found[1])
        if token < 0 or (token in tokenizer.added_tokens_decoder and token not in usual):
            raise InputError(
                f"{place}: `prompt` holds {found[0]}, a placeholder for {found[2]} tokens of an image, video or sound; "
                "gradscope measures only text: give a log without such prompts"
            )


MS_SWIFT = Format(
    "ms_swift",
    (
        *required(prompt="prompt", response="completion", advantage="advantages"),
        *optional(reward="reward", step="step", gen_step="gen_step", num_turns="num_turns"),
    ),
    _rows,
    is_lists=True,
    beside=(frozenset({"gen_step", "prompt", "completion"}),),
    notes=(
        RETOKENISED,
        "the log lacks the end-of-sequence token of a response, so it is not among the measured tokens",
    ),
)
