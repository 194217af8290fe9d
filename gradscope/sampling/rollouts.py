"""From questions to graded responses, as rows of the native rollout format or as a batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, Unpack

import numpy as np
import torch

from gradscope.errors import InputError, checked
from gradscope.policy import Policy, PolicyLike, load_policy
from gradscope.rollouts import Response, TokenBatch, collate
from gradscope.sampling.engines import make_sampler
from gradscope.sampling.hf import HFSampler
from gradscope.sampling.protocol import Sampler
from gradscope.tasks import Question, Task, draw_questions, get_task, grade_response

MOST_RESPONSES = 10_000_000
"""Most responses in one call, since all are held in memory."""


@dataclass(frozen=True)
class SamplingSettings:
    """How responses are sampled."""

    n: int = 8
    """Responses per question."""
    temperature: int | float = 1.0
    """Sampling temperature."""
    max_new_tokens: int = 1024
    """Longest response, in tokens."""
    seed: int = 0
    """Seed for sampling."""


class SamplingKeywords(TypedDict, total=False):
    """The fields of `SamplingSettings`, as keywords of `sample` and `rollout_rows`."""

    n: int
    temperature: int | float
    max_new_tokens: int
    seed: int


@checked
def sample(
    policy: PolicyLike,
    prompts: Sequence[str | list[dict[str, str]]] | None = None,
    *,
    task: str | Task | None = None,
    questions: int = 16,
    data: Sequence[str] = (),
    engine: Literal["hf", "vllm"] = "hf",
    batch_size: int = 64,
    **settings: Unpack[SamplingKeywords],
) -> TokenBatch:
    """Sample n responses to each prompt, or to each question of a task with rewards.

    Args:
        policy: or a path, as for `load_policy`.
        prompts: strings, or chats for the tokenizer's template.
        task: a name (see `tasks.task_names`), FILE.py:NAME, or a Task.
        questions: number of questions to draw from the task.
        data: files of the task's questions; default: the task generates them.
        batch_size: responses decoded together by transformers.
        settings: the fields of SamplingSettings, by name: n, temperature, max_new_tokens, seed.

    Returns:
        The batch, with the sampler's log-probabilities as old_logprobs.

    Raises:
        InputError: both prompts and a task are given, or neither, or they cannot be sampled.
    """
    chosen = checked(SamplingSettings, "sample")(**settings)
    if (prompts is None) == (task is None):
        raise InputError("give exactly one of prompts= and task=")
    if isinstance(prompts, str):
        raise InputError("prompts is one string; give a list of prompts")
    if questions < 1 or chosen.n < 1 or chosen.seed < 0:
        raise InputError(
            f"questions is {questions}, n {chosen.n} and seed {chosen.seed}; give 1 or more, 1 or more, 0 or more"
        )
    policy = policy if isinstance(policy, Policy) else load_policy(policy)
    task = get_task(task) if isinstance(task, str) else task
    if task is None:
        asked = [Question(prompt, None) for prompt in prompts]
    else:
        asked = draw_questions(task, questions, seed=chosen.seed, files=tuple(data))
    with closing(make_sampler(engine, policy, batch_size=batch_size)) as sampler:
        return batch_rows(rollout_rows(policy, asked, task=task, sampler=sampler, **settings), on_policy=False)


def rollout_rows(
    policy: Policy,
    questions: Iterable[Question],
    *,
    task: Task | None = None,
    sampler: Sampler | None = None,
    greedy: bool = False,
    **settings: Unpack[SamplingKeywords],
) -> list[dict[str, Any]]:
    """Sample n responses to each question, as rows of the native rollout format, question by question.

    task: grades the responses, adding `reward`, `correct` and `format_ok`; None: no grades.
    sampler: default HFSampler(policy). settings: the fields of SamplingSettings, by name.
    Rows also have `level` and `finished` (False: cut off before a stop token). Raises InputError if the task cannot
    grade a response, and for more than MOST_RESPONSES.
    """
    chosen, questions = checked(SamplingSettings, "rollout_rows")(**settings), list(questions)
    temperature = float(chosen.temperature)
    check_count(len(questions), chosen.n)
    prompts = [policy.encode_prompt(question.prompt) for question in questions]
    sampled = (HFSampler(policy) if sampler is None else sampler).sample(
        prompts,
        n=chosen.n,
        temperature=temperature,
        max_new_tokens=chosen.max_new_tokens,
        generator=_make_generator(chosen.seed),
        greedy=greedy,
    )
    rows = []
    for group, (question, prompt_ids, samples) in enumerate(zip(questions, prompts, sampled, strict=True)):
        for sample in samples:
            response = policy.tokenizer.decode(sample.response_ids, skip_special_tokens=True)
            row = {"prompt_ids": prompt_ids, "response_ids": sample.response_ids, "prompt": question.prompt}
            row |= {"response": response, "group": group, "old_logprobs": sample.logprobs, "temperature": temperature}
            if task is not None:
                grade = grade_response(task, response, question)
                row |= {"reward": grade.reward, "correct": grade.correct, "format_ok": grade.format_ok}
            rows.append(row | {"level": question.level, "finished": sample.finished})
    return rows


def check_count(questions: int, n: int) -> None:
    """Raise InputError for more than MOST_RESPONSES."""
    if questions * n > MOST_RESPONSES:
        raise InputError(
            f"{n} responses to each of {questions} questions are more than {MOST_RESPONSES:,}; ask for fewer"
        )


def _make_generator(seed: int) -> torch.Generator:
    """Return a torch generator; seeds beyond 64 bits are hashed down."""
    if seed >= 2**64:
        seed = int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0])
    return torch.Generator().manual_seed(seed)


def batch_rows(rows: Iterable[dict[str, Any]], *, on_policy: bool = True) -> TokenBatch:
    """Return the rows of `rollout_rows` as a batch; on_policy: drop the sampler's log-probabilities."""
    names = ["prompt_ids", "response_ids", "group", "temperature"] + ([] if on_policy else ["old_logprobs"])
    return collate([Response(**{name: row[name] for name in names}, reward=row.get("reward")) for row in rows])
