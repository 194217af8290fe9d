"""AReaL's rollout.dump_to_file: {log}/rollout/{version}/{task}.jsonl, a line per sample of a task: text, with lengths.

Its writer takes the last n tokens of a sequence as the completion, with n the number of sampled tokens, and the rest
as the prompt, which is only right for a single turn without tools. head_version is −1 with any prompt, and is not read.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace

from gradscope.policy import Policy
from gradscope.rollouts.files import Record
from gradscope.rollouts.formats.base import EVALUATED, RETOKENISED, Format, Row, required, whole_number
from gradscope.rollouts.formats.columns import read_row

TURNS = (
    "they may have several turns or tool output, in which case AReaL's log does not say which tokens were sampled "
    "(no other sample of the task has this prompt, or text follows a token that ends an answer)"
)


def _rows(records: Iterable[Record], policy: Policy | None) -> Iterator[Row]:
    trained: list[tuple[Record, tuple[int | None, int | None], str]] = []
    prompts: defaultdict[object, Counter[str]] = defaultdict(Counter)
    for record in records:
        task = whole_number(record, "tail_version"), whole_number(record, "task_id")
        if "eval-rollout" in record.path.parts:
            yield Row(record.place, {}, task[0], left_out=EVALUATED)
        else:
            trained.append((record, task, str(record.columns.get("prompt"))))
            prompts[task][trained[-1][2]] += 1
    ends = [policy.tokenizer.decode([token]) for token in policy.stop_ids] if policy and policy.tokenizer else []
    end, seen = re.compile("|".join(map(re.escape, filter(None, ends))) or r"(?!)"), Counter()
    for record, task, prompt in trained:
        row, response = read_row(AREAL, record), str(record.columns.get("completion"))
        last = end.search(response)
        goes_on = last is not None and end.sub("", response[last.end() :]).strip()
        left_out = TURNS if goes_on or prompts[task][prompt] == 1 < prompts[task].total() else None
        # The processes of a run, and a resumed run, number tasks alike and write to the same files.
        own = task, prompt if left_out is None else prompts[task].most_common(1)[0][0]
        again = *own, whole_number(record, "sample_idx")
        known = {name: value for name, value in row.columns.items() if name in ("prompt", "response", "reward")}
        known["group"] = *own, seen[again]
        seen[again] += 1
        lengths = [whole_number(record, name) for name in ("seqlen", "prompt_len")]
        length = None if None in lengths else lengths[0] - lengths[1]
        yield replace(row, columns=known, left_out=left_out, length=length)


AREAL = Format(
    "areal",
    (
        *required(prompt="prompt", response="completion", reward="reward", step="tail_version"),
        *required(group="task_id", sample_idx="sample_idx"),
    ),
    _rows,
    notes=(
        RETOKENISED,
        "AReaL logs trajectories before accepting or rejecting them: rejected ones are included, and the later step at "
        "which the others were trained is not in the log",
    ),
)
