"""ms-swift's completions.jsonl: a line per logging call, a dictionary of lists with an entry per completion.

Every logging call, and the end of training, writes the newest generation again. Evaluations are logged under the
current training step. Megatron numbers a generation by the steps completed before it (`gen_step`), the other trainers
by those completed after it (`step`). With Ray, each line is a single completion, with a reward but no advantage.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

from gradscope.errors import InputError
from gradscope.policy import Policy
from gradscope.rollouts.files import Record
from gradscope.rollouts.formats.base import (
    EVALUATED,
    MADE_AGAIN,
    RETOKENISED,
    Answers,
    Format,
    Row,
    entries,
    pick,
    whole_number,
)
from gradscope.rollouts.formats.text import prompt_of, response_of

NEEDS = ("prompt", "completion", "advantages")
TAKES = ("step", "gen_step", "num_turns")
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
        lines = [*file]
        again = _made_again(lines)
        for number, record in enumerate(lines):
            if isinstance(record.columns.get("prompt"), str):
                yield _row(record, MADE_AGAIN if number in again else None, policy)
                continue
            line = [*entries(record, NEEDS, TAKES)]
            step = _step(line[0]) if line else None
            if number in again or step == 0:  # nothing is trained on before the first step
                yield from (_row(entry, MADE_AGAIN if number in again else EVALUATED, policy) for entry in line)
                continue
            content = [tuple(str(entry.columns.get(name)) for name in NEEDS) for entry in line]
            common = min(len(content), len(newest))
            left_out = [REPEATED] * common if content[:common] == newest[:common] else []
            if not left_out and step is not None and step == before and newest:
                left_out = [EVALUATION] * len(line)
            elif len(content) > len(left_out):
                newest = content
            before = step
            for place, entry in enumerate(line):
                yield _row(entry, left_out[place] if place < len(left_out) else None, policy)


def _made_again(lines: list[Record]) -> set[int]:
    """Return the indices of lines whose steps a resumed run logged again later."""
    again, before, seen = set(), None, []
    for record in lines:
        step = _line_step(record)
        if None not in (step, before) and step < before:
            again |= {number for number, earlier in enumerate(seen) if earlier is not None and earlier >= step}
        seen.append(step)
        before = before if step is None else step
    return again


def _line_step(record: Record) -> int | None:
    """Return a line's step; that of its first entry if the line holds lists."""
    first = {name: v[0] if isinstance(v, list) and v else v for name, v in record.columns.items() if "step" in name}
    known = {name: v for name, v in first.items() if name in TAKES and not isinstance(v, list)}
    return _step(Record(record.path, record.place, known))


def _step(record: Record) -> int | None:
    taken = whole_number(record, "gen_step")
    return whole_number(record, "step") if taken is None else taken + 1


def _row(record: Record, left_out: str | None, policy: Policy | None) -> Row:
    if not {"prompt", "completion"} <= record.columns.keys():
        return Row(record.place, {}, left_out="the entry has no prompt or no completion")
    columns = pick(record, {"advantage": "advantages", "reward": "reward"})
    columns |= {"prompt": prompt_of(record, "prompt"), "response": response_of(record, "completion")}
    _check_is_text(record.place, columns["prompt"], policy)
    turns, remarks = record.columns.get("num_turns"), ()
    if isinstance(turns, (int, float)) and turns > 1:
        remarks += (LAST_TURN,)
    labels = {"response": "completion", "advantage": "advantages"}
    return Row(record.place, columns, _step(record), labels, left_out, remarks)


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
    needs=frozenset(NEEDS),
    beside=(frozenset({"gen_step", "prompt", "completion"}),),
    knows="step gen_step reward entropy solution num_turns",
    rows=_rows,
    notes=(
        RETOKENISED,
        "the log lacks the end-of-sequence token of a response, so it is not among the measured tokens",
    ),
    answers=Answers(
        group="identical prompts of a step",
        step="`step`, the optimizer steps taken when the line was written, from 1; Megatron's `gen_step` plus 1; if "
        "several steps are taken on one generation, an earlier checkpoint sampled it",
        sampled="all of the text; only the last of several turns (a note counts them); no end-of-sequence token",
        logprobs="none",
        left_out="generations already logged; evaluations and step 0; steps that a resumed run repeated; entries "
        "without prompt or completion",
        checked="4.6.0: its own code, trained for two steps (Megatron's and Ray's: a writer after the source), "
        "2026-11-27",
    ),
)
