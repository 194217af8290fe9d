"""verl's trainer.rollout_data_dir: {step}.jsonl, a line per response: input, output, gts, score, step, extras.

The default trainer (v1, from verl 0.8 on) adds `uid`, which is `{prompt}_{session}_{output}` there: one per response. A
session of an agent may have several outputs; its last one's score is the session's, and counts once in its group. Where
the batch is filled up, lines of a prompt `pad…` are no samples.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby

from gradscope.policy import Policy
from gradscope.rollouts.files import Record
from gradscope.rollouts.formats.base import (
    EVALUATED,
    NO_SPECIAL_TOKENS,
    RETOKENISED,
    Answers,
    Format,
    Row,
    numbers_beside,
    pick,
    whole_number,
)

NAMES = {"prompt": "input", "response": "output", "reward": "score", "group": "uid"}
# A key of any other kind is a whole one: `uid_sample_0_12` and `uid_sample_0_13` are two prompts.
KEY = re.compile(r"([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})_([0-9]+)_([0-9]+)")
PADDING = re.compile(r"pad[0-9a-f]{32}_[0-9]+_[0-9]+")
FILLED_UP = "verl filled up its batch with them: they are no samples"
VALIDATED = (
    "it has a column `reward` equal to its score, as verl writes of a validation (`validation_data_dir`), on which "
    "nothing is trained"
)
PENALISED = "its reward is the score of its answer and the penalty of its length (`overlong_reward`)"


def _rows(records: Iterable[Record], policy: Policy | None) -> Iterator[Row]:
    for _, file in groupby(records, key=lambda record: record.path):
        yield from _rows_of_file(_with_step([*file]))


def _with_step(file: list[Record]) -> list[Record]:
    """Yield the lines with the step of their file's name, if none has its own."""
    name = file[0].path.name.partition(".")[0]
    if not name.isdecimal() or any("step" in record.columns for record in file):
        return file
    return [replace(record, columns=record.columns | {"step": name}) for record in file]


def _rows_of_file(file: list[Record]) -> Iterator[Row]:
    """Yield the rows of one file, which holds the lines of one step."""
    keys = [_key(record) for record in file]
    last: dict[object, int] = defaultdict(int)
    for session, output in (key for key in keys if key is not None):
        last[session] = max(last[session], output)
    has_penalty = _has_penalty(file)
    for record, key in zip(file, keys, strict=True):
        row = _row(record, has_penalty)
        if key is not None:
            session, output = key
            row = replace(row, columns=row.columns | {"group": session[1]}, is_counted=output == last[session])
        yield row


def _key(record: Record) -> tuple[tuple[int | None, str, int], int] | None:
    """Return (step, prompt, session) and the output's number within the session; None for a uid that is a prompt's."""
    uid = record.columns.get("uid")
    match = KEY.fullmatch(uid) if isinstance(uid, str) else None
    return match and ((whole_number(record, "step"), match[1], int(match[2])), int(match[3]))


def _row(record: Record, has_penalty: bool) -> Row:
    step, uid = whole_number(record, "step"), record.columns.get("uid")
    if isinstance(uid, str) and PADDING.fullmatch(uid):
        return Row(record.place, {}, step, left_out=FILLED_UP)
    if step == 0:  # of the validation before training, whose first step is 1
        return Row(record.place, {}, step, left_out=EVALUATED)
    columns, remarks = pick(record, NAMES) | numbers_beside(record, ("step", "score", "uid", "request_id")), ()
    if (reward := _number(record, "reward")) is not None and reward == record.columns.get("score"):
        remarks += (VALIDATED,)
    if has_penalty and (penalty := _number(record, "overlong_reward")):
        columns["reward"], remarks = record.columns["score"] + penalty, (*remarks, PENALISED)
    return Row(record.place, columns, step, NAMES, remarks=remarks)


def _has_penalty(file: list[Record]) -> bool:
    """Return whether the length penalty still has to be added to `score`.

    The older trainer writes the reward manager's extras over its own columns. Those of a scoring function that returns
    a dictionary hold its `score`, without the penalty; those of one that returns a number hold it as `acc`.
    """
    rows = [[_number(record, name) for name in ("overlong_reward", "score", "acc")] for record in file]
    if any(None in row[:2] for row in rows):
        return False
    return not all(acc is not None and abs(score - acc - penalty) < 1e-4 for penalty, score, acc in rows)


def _number(record: Record, name: str) -> float | None:
    value = record.columns.get(name)
    return value if isinstance(value, (int, float)) else None


VERL = Format(
    "verl",
    needs=frozenset({"input", "output", "score"}),
    knows="gts step request_id uid acc overlong_reward overlong",
    rows=_rows,
    keeps_single_rewards=True,
    notes=(
        RETOKENISED,
        NO_SPECIAL_TOKENS,
        "verl's prompts were decoded without special tokens, too: a chat template's marks are lost",
    ),
    answers=Answers(
        group="the prompt in `uid`, without session and output; else `uid`; without one, identical prompts of a step",
        step="`step`, else the file's name: training steps from 1; asynchronous trainers' responses may be of earlier "
        "checkpoints",
        sampled="all of the text, a tool's output and other turns too (said where their marks are seen); no "
        "end-of-sequence token",
        logprobs="none",
        left_out="what verl fills up its batch with; step 0, which is of a validation",
        checked="0.9.1: its default (v1) trainer's own code and the older trainer's, 2026-11-27",
    ),
)
