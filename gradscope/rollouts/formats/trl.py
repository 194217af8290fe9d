"""TRL's GRPOTrainer with log_completions: completions/completions_{step:05d}.parquet, a row per completion.

Columns: step, prompt, completion, one per reward function and per extra that it logged, advantage. `step` is the
trainer's global step when the file was written: the completions are those of the newest generation before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

from gradscope.policy import Policy
from gradscope.rollouts.files import Record
from gradscope.rollouts.formats.base import NO_SPECIAL_TOKENS, RETOKENISED, Answers, Format, Row, pick, whole_number
from gradscope.rollouts.formats.text import prompt_of, response_of

REPEATED = "the file before holds the same generation (TRL writes the newest one at every logging step)"


def _rows(records: Iterable[Record], policy: Policy | None) -> Iterator[Row]:
    earlier = None
    for _, group in groupby(records, key=lambda record: record.path):
        file = list(group)
        content = [{name: v for name, v in record.columns.items() if name != "step"} for record in file]
        for record in file:
            yield _row(record, repeated=content == earlier)
        earlier = content


def _row(record: Record, repeated: bool) -> Row:
    # TRL's reward columns bear any name and their weights are not in the file: the advantage is all that counts.
    columns = {"prompt": prompt_of(record, "prompt"), "response": response_of(record, "completion")}
    labels = {"response": "completion"}
    step = whole_number(record, "step")
    return Row(
        record.place, columns | pick(record, {"advantage": "advantage"}), step, labels, REPEATED if repeated else None
    )


TRL = Format(
    "trl",
    needs=frozenset({"step", "prompt", "completion", "advantage"}),
    knows="",
    rows=_rows,
    notes=(
        RETOKENISED,
        NO_SPECIAL_TOKENS,
        "TRL's loss settings are not in the log: clip ratios and KL are the paper's unless flags say otherwise",
        "TRL's tools and chat template are not in the log: a chat goes through the policy's own template",
    ),
    answers=Answers(
        group="identical prompts of a step",
        step="`step`: the optimizer steps taken when the file was written, from 1",
        sampled="all of the text; no end-of-sequence token",
        logprobs="none",
        left_out="a file that repeats the generation of the one before",
        checked="after the source",
    ),
)
