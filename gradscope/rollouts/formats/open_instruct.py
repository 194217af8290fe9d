"""open-instruct's save_traces: {run}_rollouts_{shard:06d}.jsonl, a line per response, ids and log-probabilities."""

from __future__ import annotations

from gradscope.policy import Policy
from gradscope.rollouts.files import Record
from gradscope.rollouts.formats.base import Answers, Format, Row, pick, row_by_row, whole_number

NAMES = {
    "prompt_ids": "prompt_tokens",
    "response_ids": "response_tokens",
    "old_logprobs": "logprobs",
    "reward": "reward",
    "advantage": "advantage",
    "group": "prompt_idx",
}


def _row(record: Record, policy: Policy | None) -> Row:
    return Row(record.place, pick(record, NAMES), whole_number(record, "step"), NAMES)


OPEN_INSTRUCT = Format(
    "open_instruct",
    needs=frozenset({"prompt_tokens", "response_tokens"}),
    knows=("step sample_idx prompt_idx reward advantage finish_reason dataset ground_truth request_info logprobs"),
    rows=row_by_row(_row),
    notes=(
        "the log-probabilities are the sampler's: ratios are to these, where the trainer may have recomputed its own",
        "the log has no mask: a tool's output, if there was any, counts as sampled",
    ),
    answers=Answers(
        group="`prompt_idx` within a step",
        step="`step`",
        sampled="the whole response, a tool's output too",
        logprobs="`logprobs`: the sampler's, by which ratios are",
        left_out="none",
        checked="after the source",
    ),
)
