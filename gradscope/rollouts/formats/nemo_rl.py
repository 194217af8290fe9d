"""NeMo-RL's train_data_step{N}.jsonl: a line per sample, with arrays padded to the step's longest sample.

Validations are in val_data_step{N}.jsonl in the same folder, with only messages and rewards.

The batch is written in slices of one sample, so each value is a list of one entry: rewards [0.5], token_ids [[5, 6]].
Entry s of generation_logprobs, prev_logprobs and advantages belongs to token s.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from gradscope.policy import Policy
from gradscope.rollouts.files import Record
from gradscope.rollouts.formats.base import EVALUATED, MASKED_OUT, Format, Row, optional, required
from gradscope.rollouts.formats.columns import read_row

UNRECORDED = (
    "some tokens with a trainer probability below 1/e have a generation_logprob of exactly 0: the sampler did not "
    "record them, so they are taken as unknown"
)
FORCED = (
    "their prev_logprobs are all exactly 0: the run did not compute them (force_on_policy_ratio) and trained with "
    "ratio 1, which is used here too"
)


def _rows(records: Iterable[Record], policy: Policy | None) -> Iterator[Row]:
    rows = [read_row(NEMO_RL, _unsliced(record)) for record in records]  # a forced ratio shows only over all steps
    trained = [row for row in rows if "old_logprobs" in row.columns]
    forced = bool(trained) and not any(any(row.columns["old_logprobs"]) for row in trained)
    for row in rows:
        if forced and row.left_out is None:
            others = {name: v for name, v in row.columns.items() if name != "old_logprobs"}
            yield replace(row, columns=others, remarks=(*row.remarks, FORCED))
        else:
            yield _without_unrecorded(row)


def _unsliced(record: Record) -> Record:
    """Unpack the record's lists of one entry, if it is a slice of one sample."""
    ids = record.columns.get("token_ids")
    if not (isinstance(ids, list) and len(ids) == 1 and isinstance(ids[0], list)):
        return record
    plain = {n: v[0] if isinstance(v, list) and len(v) == 1 else v for n, v in record.columns.items()}
    return replace(record, columns={name: value for name, value in plain.items() if value is not None})


def _without_unrecorded(row: Row) -> Row:
    """Set the sampler's log-probability to None for tokens where it was not recorded."""
    own, sampler, kept = (row.columns.get(name) for name in ("old_logprobs", "sampler_logprobs", "response_mask"))
    if own is None or sampler is None or row.left_out is not None:
        return row
    each, number = zip(kept, sampler, own, strict=True), int | float
    lost = [keep == 1 and said == 0 and isinstance(value, number) and value < -1 for keep, said, value in each]
    if not any(lost):
        return row
    known = [None if gone else said for gone, said in zip(lost, sampler, strict=True)]
    return replace(row, columns=row.columns | {"sampler_logprobs": known}, remarks=(*row.remarks, UNRECORDED))


NEMO_RL = Format(
    "nemo_rl",
    (
        *required(ids="token_ids", mask="token_loss_mask"),
        *optional(old_logprobs="prev_logprobs", advantage="advantages"),
        *optional(sampler_logprobs="generation_logprobs", reward="rewards", length="input_lengths"),
        *optional(old_logprobs="generation_logprobs"),
    ),
    _rows,
    step_in="step_?([0-9]+)",
    left_out=(
        (EVALUATED, lambda record: record.path.stem.startswith("val_data")),
        (MASKED_OUT, lambda record: record.columns.get("sample_loss_mask", 1) == 0),
    ),
    beside=(frozenset({"content", "rewards"}),),
    notes=(
        "ratios are relative to NeMo-RL's prev_logprobs (the trainer's own, before the step), as in training; its "
        "correction for the sampler's generation_logprobs is not applied",
        "the log does not identify prompts: samples of a step with the same tokens before the first trained one form a "
        "group",
    ),
)
