"""NeMo-RL's train_data_step{N}.jsonl, a line per sample, its arrays padded to the longest of the step.

Entry s of generation_logprobs, prev_logprobs and advantages is about token s.
"""

from __future__ import annotations

import re

from gradscope.policy import Policy
from gradscope.rollouts.files import Record
from gradscope.rollouts.formats.base import MASKED_OUT, Answers, Format, Row, pick, row_by_row, whole_number
from gradscope.rollouts.formats.sequences import split_sequence

PER_TOKEN = {
    "old_logprobs": "prev_logprobs",
    "logprobs": "prev_logprobs",
    "sampler_logprobs": "generation_logprobs",
}


def _row(record: Record, policy: Policy | None) -> Row:
    named = re.search(r"step_?([0-9]+)", record.path.stem)
    step = whole_number(Record(record.path, record.place, {"step": named[1] if named else None}), "step")
    if record.columns.get("sample_loss_mask", 1) == 0:
        return Row(record.place, {}, step, left_out=MASKED_OUT)
    per_token, columns = dict(PER_TOKEN), pick(record, {"reward": "rewards"})
    if "prev_logprobs" not in record.columns:
        per_token = {"old_logprobs": "generation_logprobs"}
    if isinstance(record.columns.get("advantages"), list):
        per_token["advantage"] = "advantages"
    else:
        columns |= pick(record, {"advantage": "advantages"})
    arrays = {"ids": "token_ids", "mask": "token_loss_mask", "per_token": per_token}
    return split_sequence(record, **arrays, columns=columns, step=step, length=whole_number(record, "input_lengths"))


NEMO_RL = Format(
    "nemo_rl",
    needs=frozenset({"token_ids", "token_loss_mask"}),
    knows=(
        "content rewards filtered_rewards input_lengths sample_loss_mask advantages generation_logprobs prev_logprobs "
        "agent_ref"
    ),
    rows=row_by_row(_row),
    notes=(
        "ratios are to NeMo-RL's prev_logprobs (the trainer's own, before the step), the denominator that it trains "
        "with; its correction for the sampler's generation_logprobs is not applied",
        "the log names no prompts: samples of a step with the same tokens before the first trained one are a group",
    ),
    answers=Answers(
        group="the same tokens before the first trained one, within a step",
        step="the number in the file's name",
        sampled="those that `token_loss_mask` keeps",
        logprobs="`prev_logprobs`: the trainer's, by which ratios are; `generation_logprobs`: the sampler's",
        left_out="samples whose `sample_loss_mask` is 0",
        checked="after the source",
    ),
)
