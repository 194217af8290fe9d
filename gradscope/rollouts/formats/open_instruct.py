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
from gradscope.rollouts.formats.base import MADE_AGAIN, Answers, Format, Row, pick, whole_number

NAMES = {
    "prompt_ids": "prompt_tokens",
    "response_ids": "response_tokens",
    "old_logprobs": "logprobs",
    "reward": "reward",
    "advantage": "advantage",
    "group": "prompt_idx",
}


ABOUT = frozenset({"run_name", "model_name"})
"""Columns of the metadata file."""


def _rows(records: Iterable[Record], policy: Policy | None) -> Iterator[Row]:
    rows, newest, runs = [], {}, {}
    for record in records:
        if record.columns.keys() >= ABOUT:
            continue
        runs.setdefault(record.path.name.rpartition("_rollouts_")[0], record.path)
        step, sample = whole_number(record, "step"), whole_number(record, "sample_idx")
        columns = pick(record, NAMES)
        if "prompt_idx" in record.columns and isinstance(columns.get("prompt_ids"), list):
            columns["group"] = (whole_number(record, "prompt_idx"), *columns["prompt_ids"])
        if None not in (step, sample):
            newest[step, sample] = len(rows)
        rows.append((Row(record.place, columns, step, NAMES), sample))
    if len(runs) > 1:
        first, second = sorted(map(str, runs.values()))[:2]
        raise InputError(f"{first} and {second} are from two runs with step numbers of their own; give one run")
    for at, (row, sample) in enumerate(rows):
        stale = newest.get((row.step, sample), at) != at
        yield Row(row.place, {}, row.step, left_out=MADE_AGAIN) if stale else row


OPEN_INSTRUCT = Format(
    "open_instruct",
    needs=frozenset({"prompt_tokens", "response_tokens"}),
    knows=("step sample_idx prompt_idx reward advantage finish_reason dataset ground_truth request_info logprobs"),
    rows=_rows,
    beside=(ABOUT,),
    notes=(
        "the log-probabilities are the sampler's and ratios use them; the trainer may have used its own, recomputed",
        "the log has no mask: tool output, if any, counts as sampled",
    ),
    first_step=0,
    answers=Answers(
        group="`prompt_idx` and the prompt's tokens, within a step",
        step=(
            "`step`, from 0; `step_N` is the checkpoint after N steps; vLLM's weights may be older (not in the log)"
        ),
        sampled=(
            "the whole response, including tool output (log π exactly 0; a note counts it); for an empty response, "
            "the inserted end-of-sequence token (log π NaN, unknown)"
        ),
        logprobs=(
            "`logprobs`: vLLM's processed ones, at the sampling temperature; ratios use them, since the trainer's own "
            "are not in the log"
        ),
        left_out="samples that a resumed run repeated (the last one counts); several runs in a folder are refused",
        checked="open-instruct e6c3044a (2026-08-20): a writer after its source; 2026-11-27",
    ),
)
