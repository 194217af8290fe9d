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
    FILLED_UP,
    NO_SPECIAL_TOKENS,
    RETOKENISED,
    Format,
    Row,
    optional,
    required,
    whole_number,
)
from gradscope.rollouts.formats.columns import read_row

# Any other uid identifies a prompt as a whole: `uid_sample_0_12` and `uid_sample_0_13` are two prompts.
KEY = re.compile(r"(pad[0-9a-f]{32}|[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})_([0-9]+)_([0-9]+)")
VALIDATED = (
    "their column `reward` equals the score, as verl writes it for a validation (`validation_data_dir`), which is not "
    "trained on"
)
PENALISED = "their rewards are the answers' scores plus the length penalty (`overlong_reward`)"


def _rows(records: Iterable[Record], policy: Policy | None) -> Iterator[Row]:
    for path, group in groupby(records, key=lambda record: record.path):  # a file holds one step
        file, name = [*group], path.name.partition(".")[0]
        if name.isdecimal() and not any("step" in record.columns for record in file):
            file = [replace(record, columns=record.columns | {"step": name}) for record in file]
        rows, keys = [_row(record, has_penalty) for has_penalty in [_has_penalty(file)] for record in file], []
        last: dict[object, int] = defaultdict(int)
        for row in rows:
            match = KEY.fullmatch(str(row.columns.get("group")))
            keys.append(match and ((row.step, match[1], int(match[2])), int(match[3])))
            if match:
                last[keys[-1][0]] = max(last[keys[-1][0]], int(match[3]))
        for row, key in zip(rows, keys, strict=True):
            if key is None:
                yield row
            elif key[0][1].startswith("pad"):
                yield Row(row.place, {}, row.step, left_out=FILLED_UP)
            else:
                yield replace(row, columns=row.columns | {"group": key[0][1]}, is_counted=key[1] == last[key[0]])


def _row(record: Record, has_penalty: bool) -> Row:
    row = read_row(VERL, record)
    if row.left_out is None and has_penalty and (penalty := _number(record, "overlong_reward")):
        reward = record.columns["score"] + penalty
        row = replace(row, columns=row.columns | {"reward": reward}, remarks=(*row.remarks, PENALISED))
    return row


def _has_penalty(file: list[Record]) -> bool:
    """Return whether the length penalty still has to be added to `score`.

    In the older trainer, the reward manager's extras overwrite its own columns. If the scoring function returns a
    dictionary, they include its `score`, without the penalty; if it returns a number, they include it as `acc`.
    """
    rows = [[_number(record, name) for name in ("overlong_reward", "score", "acc")] for record in file]
    if any(None in row[:2] for row in rows):
        return False
    return not all(acc is not None and abs(score - acc - penalty) < 1e-4 for penalty, score, acc in rows)


def _is_validated(record: Record) -> bool:
    reward = _number(record, "reward")
    return reward is not None and reward == record.columns.get("score")


def _number(record: Record, name: str) -> float | None:
    value = record.columns.get(name)
    return value if isinstance(value, (int, float)) else None


VERL = Format(
    "verl",
    (
        *required(prompt="input", response="output", reward="score"),
        *optional(step="step", group="uid", ground_truth="gts"),
    ),
    _rows,
    left_out=((EVALUATED, lambda record: whole_number(record, "step") == 0),),  # a validation; training starts at 1
    remarks=((VALIDATED, _is_validated),),
    has_parts=True,
    keeps_single_rewards=True,
    notes=(
        RETOKENISED,
        NO_SPECIAL_TOKENS,
        "verl's prompts were decoded without special tokens, too: a chat template's marks are lost",
    ),
)
