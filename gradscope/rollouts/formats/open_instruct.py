"""open-instruct's save_traces: {run}_rollouts_{shard:06d}.jsonl, a line per response with ids and log-probabilities.

prompt_idx is a sample's index within its step, divided by the configured group size. It does not account for truncated
samples that were filtered out, so one prompt_idx can cover several prompts. Tool output has log-probabilities of
exactly 0; the end-of-sequence token inserted into an empty response has NaN. {run}_metadata.jsonl describes the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from gradscope.errors import InputError
from gradscope.policy import Policy
from gradscope.rollouts.files import Record
from gradscope.rollouts.formats.base import MADE_AGAIN, Format, Row, optional, required, whole_number
from gradscope.rollouts.formats.columns import read_row

ABOUT = frozenset({"run_name", "model_name"})
"""Columns of the metadata file."""


def _rows(records: Iterable[Record], policy: Policy | None) -> Iterator[Row]:
    rows, newest, runs = [], {}, {}
    for record in records:
        if record.columns.keys() >= ABOUT:
            continue
        runs.setdefault(record.path.name.rpartition("_rollouts_")[0], record.path)
        row, sample = read_row(OPEN_INSTRUCT, record), whole_number(record, "sample_idx")
        if "group" in row.columns and isinstance(row.columns.get("prompt_ids"), list):
            row.columns["group"] = (whole_number(record, "prompt_idx"), *row.columns["prompt_ids"])
        if None not in (row.step, sample):
            newest[row.step, sample] = len(rows)
        rows.append((row, sample))
    if len(runs) > 1:
        first, second = sorted(map(str, runs.values()))[:2]
        raise InputError(f"{first} and {second} are from two runs with step numbers of their own; give one run")
    for at, (row, sample) in enumerate(rows):
        stale = newest.get((row.step, sample), at) != at
        yield Row(row.place, {}, row.step, left_out=MADE_AGAIN) if stale else row


OPEN_INSTRUCT = Format(
    "open_instruct",
    (
        *required(prompt_ids="prompt_tokens", response_ids="response_tokens"),
        *optional(old_logprobs="logprobs", reward="reward", advantage="advantage", group="prompt_idx"),
        *optional(step="step"),
    ),
    _rows,
    beside=(ABOUT,),
    notes=(
        "the log-probabilities are the sampler's and ratios use them; the trainer may have used its own, recomputed",
        "the log has no mask: tool output, if any, counts as sampled",
    ),
    first_step=0,
)
