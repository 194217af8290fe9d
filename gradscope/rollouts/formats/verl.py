"""verl's trainer.rollout_data_dir: {step}.jsonl, a line per response: input, output, gts, score, step, extras.

The default trainer (v1, from verl 0.8 on) adds a `uid` per response, `{prompt}_{session}_{output}`. An agent's session
may have several outputs; the last one's score is the session's and counts once in its group. Lines whose prompt is
`pad…` are padding of the batch, not samples.
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
# Any other uid identifies a prompt as a whole: `uid_sample_0_12` and `uid_sample_0_13` are two prompts.
KEY = re.compile(r"([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})_([0-9]+)_([0-9]+)")
PADDING = re.compile(r"pad[0-9a-f]{32}_[0-9]+_[0-9]+")
FILLED_UP = "they are padding of verl's batch, not samples"
VALIDATED = (
    "their column `reward` equals the score, as verl writes it for a validation (`validation_data_dir`), which is not "
    "trained on"
)
PENALISED = "their rewards are the answers' scores plus the length penalty (`overlong_reward`)"


def _rows(records: Iterable[Record], policy: Policy | None) -> Iterator[Row]:
    for _, file in groupby(records, key=lambda record: record.path):
        yield from _rows_of_file(_with_step([*file]))


def _with_step(file: list[Record]) -> list[Record]:
    """Return the lines with the step from the file name, if no line has its own."""
    name = file[0].path.name.partition(".")[0]
    if not name.isdecimal() or any("step" in record.columns for record in file):
        return file
    return [replace(record, columns=record.columns | {"step": name}) for record in file]


def _rows_of_file(file: list[Record]) -> Iterator[Row]:
    """Yield the rows of one file, that is, of one step."""
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
    """Return (step, prompt, session) and the output's number in the session; None if the uid identifies a prompt."""
    uid = record.columns.get("uid")
    match = KEY.fullmatch(uid) if isinstance(uid, str) else None
    return match and ((whole_number(record, "step"), match[1], int(match[2])), int(match[3]))


def _row(record: Record, has_penalty: bool) -> Row:
    step, uid = whole_number(record, "step"), record.columns.get("uid")
    if isinstance(uid, str) and PADDING.fullmatch(uid):
        return Row(record.place, {}, step, left_out=FILLED_UP)
    if step == 0:  # the validation before training; training starts at 1
        return Row(record.place, {}, step, left_out=EVALUATED)
    columns, remarks = pick(record, NAMES) | numbers_beside(record, ("step", "score", "uid", "request_id")), ()
    if (reward := _number(record, "reward")) is not None and reward == record.columns.get("score"):
        remarks += (VALIDATED,)
    if has_penalty and (penalty := _number(record, "overlong_reward")):
        columns["reward"], remarks = record.columns["score"] + penalty, (*remarks, PENALISED)
    return Row(record.place, columns, step, NAMES, remarks=remarks)


def _has_penalty(file: list[Record]) -> bool:
    """Return whether the length penalty still has to be added to `score`.

    In the older trainer, the reward manager's extras overwrite its own columns. If the scoring function returns a
    dictionary, they include its `score`, without the penalty; if it returns a number, they include it as `acc`.
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
        step="`step`, else the file name: training steps from 1; asynchronous trainers may have sampled with earlier "
        "checkpoints",
        sampled="the whole text, including tool output and other turns (a note counts them if their marks show); no "
        "end-of-sequence token",
        logprobs="none",
        left_out="padding of verl's batch; step 0, a validation",
        checked="0.9.1: its default (v1) trainer's own code and the older trainer's, 2026-11-27",
    ),
)
