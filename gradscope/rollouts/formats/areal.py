"""AReaL's rollout.dump_to_file: {log}/rollout/{version}/{task}.jsonl, a line per sample of a task: text, with lengths.

Its writer takes the last n tokens of a sequence as the completion, with n the number of sampled tokens, and the rest
as the prompt, which is only right for a single turn without tools. head_version is −1 with any prompt, and is not read.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

from gradscope.policy import Policy
from gradscope.rollouts.files import Record
from gradscope.rollouts.formats.base import EVALUATED, RETOKENISED, Answers, Format, Row, pick, whole_number

NAMES = {"prompt": "prompt", "response": "completion", "reward": "reward"}
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
        columns, response = pick(record, NAMES), str(record.columns.get("completion"))
        last = end.search(response)
        goes_on = last is not None and end.sub("", response[last.end() :]).strip()
        left_out = TURNS if goes_on or prompts[task][prompt] == 1 < prompts[task].total() else None
        # The processes of a run, and a resumed run, number tasks alike and write to the same files.
        own = task, prompt if left_out is None else prompts[task].most_common(1)[0][0]
        again = *own, whole_number(record, "sample_idx")
        columns["group"] = *own, seen[again]
        seen[again] += 1
        lengths = [whole_number(record, name) for name in ("seqlen", "prompt_len")]
        length = None if None in lengths else lengths[0] - lengths[1]
        yield Row(record.place, columns, task[0], NAMES, left_out, length=length)


AREAL = Format(
    "areal",
    needs=frozenset({"task_id", "sample_idx", "tail_version", "prompt", "completion", "reward"}),
    knows="seqlen prompt_len head_version",
    rows=_rows,
    notes=(
        RETOKENISED,
        "AReaL logs trajectories before accepting or rejecting them: rejected ones are included, and the later step at "
        "which the others were trained is not in the log",
    ),
    answers=Answers(
        group="`task_id` and the prompt, within a version",
        step="`tail_version`, the folder's name: the optimizer steps taken by the newest weights that sampled any "
        "token of the task; a checkpoint's `globalstepN` counts from 0",
        sampled="all of the completion, with the token that ended it",
        logprobs="none",
        left_out="evaluations (`eval-rollout`); samples that may have several turns: no other sample of the task "
        "has the prompt, or text follows a token that ends an answer",
        checked="1.0.4: its writer's own code (that of 4aef98d8, 2026-05-21), 2026-11-27",
    ),
)
