"""verifiers' results.jsonl: a line per rollout of an environment, text with a reward but no log-probabilities.

Written by versions up to 0.3; later ones save traces. A failed rollout has no completion, or an `error`.
"""

from __future__ import annotations

from gradscope.policy import Policy
from gradscope.rollouts.files import Record
from gradscope.rollouts.formats.base import NO_SPECIAL_TOKENS, RETOKENISED, Answers, Format, Row, pick, row_by_row
from gradscope.rollouts.formats.text import prompt_of, response_of

FAILED = "they ended in an error"


def _row(record: Record, policy: Policy | None) -> Row:
    columns = pick(record, {"reward": "reward", "group": "example_id"})
    if "completion" not in record.columns or record.columns.get("error"):
        return Row(record.place, {}, left_out=FAILED)
    columns |= {"prompt": prompt_of(record, "prompt"), "response": response_of(record, "completion")}
    return Row(record.place, columns, labels={"response": "completion", "group": "example_id"})


VERIFIERS = Format(
    "verifiers",
    needs=frozenset({"example_id", "reward"}),
    knows=(
        "prompt completion answer info error timing is_completed is_truncated stop_condition metrics tool_defs "
        "token_usage"
    ),
    rows=row_by_row(_row),
    notes=(RETOKENISED, NO_SPECIAL_TOKENS),
    answers=Answers(
        group="`example_id`",
        step="none",
        sampled="the whole text, without an end-of-sequence token; several turns and tool calls are refused",
        logprobs="none",
        left_out="rollouts that ended in an error",
        checked="verifiers 0.1.14: its own code; 2026-11-27",
    ),
)
