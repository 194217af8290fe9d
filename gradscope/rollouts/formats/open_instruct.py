"""open-instruct's save_traces: {run}_rollouts_{shard:06d}.jsonl, a line per response, ids and log-probabilities.

prompt_idx counts the samples of a step in groups of the configured size, also where truncated ones were filtered out
before: then one index stands for several prompts. What a tool said has log-probabilities of exactly 0, and an
end-of-sequence token that was put into an empty response has NaN. {run}_metadata.jsonl beside it describes the run.
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
"""Columns of the run's metadata."""


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
        raise InputError(f"{first} and {second} are of two runs, which number their steps alike; give the files of one")
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
        "the log-probabilities are the sampler's: ratios are to these, where the trainer may have recomputed its own",
        "the log has no mask: a tool's output, if there was any, counts as sampled",
    ),
    first_step=0,
    answers=Answers(
        group="`prompt_idx` and the prompt's tokens, within a step",
        step=(
            "`step`, from 0; `step_N` is the checkpoint after N of them, and vLLM may lag behind it (not in the log)"
        ),
        sampled=(
            "the whole response, a tool's output too (log π exactly 0: a note counts); of an empty one the "
            "end-of-sequence token that was put there (log π NaN, unknown)"
        ),
        logprobs=(
            "`logprobs`: vLLM's processed ones, at the sampling temperature, by which ratios are; the trainer's "
            "own, if it computed them, are not in the log"
        ),
        left_out="samples that a resumed run made again: the last one counts; several runs in a folder are refused",
        checked="open-instruct e6c3044a (2026-08-20): a writer after its source; 2026-11-27",
    ),
)
