"""ms-swift's completions.jsonl: a line per logging call, a dictionary of lists with an entry per completion."""

from __future__ import annotations

from gradscope.policy import Policy
from gradscope.rollouts.files import Record
from gradscope.rollouts.formats.base import (
    NO_SPECIAL_TOKENS,
    RETOKENISED,
    Answers,
    Format,
    Row,
    list_by_list,
    pick,
    whole_number,
)
from gradscope.rollouts.formats.text import prompt_of, response_of

NEEDS = ("prompt", "completion", "advantages")


def _row(record: Record, _policy: Policy | None) -> Row:
    if not {"prompt", "completion"} <= record.columns.keys():
        return Row(record.place, {}, left_out="the entry has no prompt or no completion")
    step = whole_number(record, "gen_step" if "gen_step" in record.columns else "step")
    columns = pick(record, {"advantage": "advantages"})
    columns["prompt"] = prompt_of(record, "prompt")
    columns["response"] = response_of(record, "completion")
    return Row(record.place, columns, step, {"response": "completion", "advantage": "advantages"})


MS_SWIFT = Format(
    "ms_swift",
    needs=frozenset(NEEDS),
    knows="step gen_step reward entropy solution num_turns",
    rows=list_by_list(_row, NEEDS, ("step", "gen_step")),
    notes=(RETOKENISED, NO_SPECIAL_TOKENS),
    answers=Answers(
        group="identical prompts of a step",
        step="`gen_step`, else `step`",
        sampled="all of the text; no end-of-sequence token",
        logprobs="none",
        left_out="entries without prompt or completion",
        checked="after the source",
    ),
)
