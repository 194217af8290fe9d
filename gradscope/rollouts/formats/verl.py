"""verl's trainer.rollout_data_dir: {step}.jsonl, a line per response: input, output, gts, score, step, extras."""

from __future__ import annotations

from gradscope.policy import Policy
from gradscope.rollouts.files import Record
from gradscope.rollouts.formats.base import (
    NO_SPECIAL_TOKENS,
    RETOKENISED,
    Answers,
    Format,
    Row,
    pick,
    row_by_row,
    whole_number,
)

NAMES = {"prompt": "input", "response": "output", "reward": "score", "group": "uid"}


def _row(record: Record, policy: Policy | None) -> Row:
    return Row(record.place, pick(record, NAMES), whole_number(record, "step"), NAMES)


VERL = Format(
    "verl",
    needs=frozenset({"input", "output", "score"}),
    knows="gts step request_id uid",
    rows=row_by_row(_row),
    keeps_single_rewards=True,
    notes=(
        RETOKENISED,
        NO_SPECIAL_TOKENS,
        "verl's prompts were decoded without special tokens, too: a chat template's marks are lost",
    ),
    answers=Answers(
        group="`uid`, else identical prompts, within a step",
        step="`step`, from 1",
        sampled="all of the text, a tool's output too; no end-of-sequence token",
        logprobs="none",
        left_out="none",
        checked="after the source",
    ),
)
