"""Debug logs of slime and of miles, saved by torch: rollout data and train data, joined where both are there.

Rollout data: {rollout_id, samples: [{group_index, index, tokens, response_length, reward, loss_mask,
rollout_log_probs, …}]}; train data: {rollout_id, samples: [{sample_index, tokens, log_probs, ref_log_probs, advantages,
entropy, …}]}, or, in miles, {rollout_id, rank, rollout_data: {tokens, response_lengths, loss_masks, sample_indices,
log_probs, …}}, a list per column. All but tokens is about the response alone. Files are read with weights_only: nothing
in them is run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from gradscope.errors import InputError, show
from gradscope.policy import Policy
from gradscope.rollouts.files import Record
from gradscope.rollouts.formats.base import EMPTY, MASKED_OUT, Answers, Format, Row, pick, whole_number

NAMES = {
    "response_mask": "loss_mask",
    "old_logprobs": "log_probs",
    "ref_logprobs": "ref_log_probs",
    "advantage": "advantages",
    "entropy": "entropy",
    "logprobs": "log_probs",
    "sampler_logprobs": "rollout_log_probs",
    "group": "group_index",
    "reward": "reward",
    "response": "response",
}
UNTRAINED = "no train data has them, though there is train data of other samples"
TWICE = "another rank's train data has the same sample"


def _rows(records: Iterable[Record], policy: Policy | None) -> Iterator[Row]:
    trained, sampled = [], {}
    for record in records:
        if "log_probs" in record.columns or "advantages" in record.columns:
            trained.append(record)
        else:
            sampled[_key(record, "index", len(sampled))] = record
    joined = set()
    for number, record in enumerate(trained):
        key = _key(record, "sample_index", -1 - number)
        yield Row(record.place, {}, key[0], left_out=TWICE) if key in joined else _row(_join(record, sampled.get(key)))
        joined.add(key)
    for key, record in sampled.items():
        if not trained:
            yield _row(record)
        elif key not in joined:
            yield Row(record.place, {}, key[0], left_out=UNTRAINED)


def _key(record: Record, name: str, default: int) -> tuple[int | None, int]:
    index = whole_number(record, name)
    return whole_number(record, "rollout_id"), default if index is None else index


def _join(trained: Record, sampled: Record | None) -> Record:
    """The train data's columns and those that only the rollout data have."""
    if sampled is None:
        return trained
    if _tokens(trained) != _tokens(sampled):
        raise InputError(
            f"{trained.place}: `tokens` differ from those of {sampled.place}, which bears the same index; give "
            "logs of one run"
        )
    return Record(trained.path, trained.place, sampled.columns | trained.columns)


def _row(record: Record) -> Row:
    tokens, length, step = _tokens(record), _response_length(record), whole_number(record, "rollout_id")
    if not 0 <= length <= len(tokens):
        raise InputError(f"{record.place}: `tokens` is {show(tokens)}, of which {length} are to be the response's")
    if length == 0:
        return Row(record.place, {}, step, left_out=EMPTY)
    row: dict[str, Any] = {"prompt_ids": tokens[:-length], "response_ids": tokens[-length:]} | pick(record, NAMES)
    labels = {"prompt_ids": "tokens", "response_ids": "tokens"} | NAMES
    if isinstance(mask := row.get("response_mask"), list) and not any(mask):
        return Row(record.place, {}, step, left_out=MASKED_OUT)
    if "old_logprobs" not in row and "sampler_logprobs" in row:
        row["old_logprobs"], labels["old_logprobs"] = row.pop("sampler_logprobs"), "rollout_log_probs"
    if "advantage" in row and not isinstance(row.get("reward"), (int, float)):
        row.pop("reward", None)  # a dictionary, of which slime's settings name one entry
    return Row(record.place, row, step, labels)


def _tokens(record: Record) -> list[int]:
    tokens = record.columns.get("tokens")
    if not isinstance(tokens, list) or not set(map(type, tokens)) <= {int}:
        raise InputError(f"{record.place}: `tokens` is {show(tokens)}; give a list of whole numbers")
    return tokens


def _response_length(record: Record) -> int:
    length = whole_number(record, "response_length")
    if length is not None:
        return length
    for name in ("log_probs", "advantages", "rollout_log_probs", "loss_mask"):
        if isinstance(record.columns.get(name), list):
            return len(record.columns[name])
    raise InputError(f"{record.place}: neither `response_length` nor `log_probs` says where the response starts")


SLIME = Format(
    "slime",
    needs=frozenset({"tokens"}),
    knows=(
        "rollout_id group_index index prompt response response_length label reward loss_mask rollout_log_probs status "
        "sample_index log_probs ref_log_probs advantages returns kl entropy"
    ),
    rows=_rows,
    notes=(
        "ratios are to slime's log_probs (the trainer's own, before the step), where the log has them, else to its "
        "rollout_log_probs",
    ),
    answers=Answers(
        group="`group_index` within a step",
        step="`rollout_id`",
        sampled="those that `loss_mask` keeps",
        logprobs="`log_probs`: the trainer's, by which ratios are; `rollout_log_probs`: the sampler's",
        left_out="samples without train data, where others have some; another rank's copies",
        checked="after the source",
    ),
)
