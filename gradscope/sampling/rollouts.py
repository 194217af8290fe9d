"""From questions to graded responses: rows of the native rollout format, and the batch that they make."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import closing
from typing import Any, Literal

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


@checked
def sample(
    policy: PolicyLike,
    prompts: Sequence[str | list[dict[str, str]]] | None = None,
    *,
    task: str | Task | None = None,
    questions: int = 16,
    data: Sequence[str] = (),
    n: int = 8,
    temperature: int | float = 1.0,
    max_new_tokens: int = 1024,
    seed: int = 0,
    engine: Literal["hf", "vllm"] = "hf",
    batch_size: int = 64,
) -> TokenBatch:
    """Sample n responses to each prompt, or to questions of a task that rewards them.

    policy: or the path that `load_policy` takes. prompts: strings, or chats for the tokenizer's template. task: a name
    (see `tasks.task_names`), FILE.py:NAME, or a Task; data: files of its questions, None: it makes them up. The batch
    holds the sampler's log-probabilities as old_logprobs; batch_size: responses decoded together by transformers.
    Raises InputError with both prompts and a task or neither, and for what cannot be sampled.
    """
    if (prompts is None) == (task is None):
        raise InputError("give either prompts= or task=: one of the two says what to answer")
    if isinstance(prompts, str):
        raise InputError("prompts is one string; give a list of prompts")
    if questions < 1 or n < 1 or seed < 0:
        raise InputError(f"questions is {questions}, n {n} and seed {seed}; give 1 or more, 1 or more, 0 or more")
    policy = policy if isinstance(policy, Policy) else load_policy(policy)
    task = get_task(task) if isinstance(task, str) else task
    if task is None:
        asked = [Question(prompt, None) for prompt in prompts]
    else:
        asked = draw_questions(task, questions, seed=seed, files=tuple(data))
    settings = {"n": n, "temperature": float(temperature), "max_new_tokens": max_new_tokens, "seed": seed}
    with closing(make_sampler(engine, policy, batch_size=batch_size)) as sampler:
        return batch_rows(rollout_rows(policy, asked, task=task, sampler=sampler, **settings), on_policy=False)


def rollout_rows(
    policy: Policy,
    questions: Iterable[Question],
    *,
    n: int,
    temperature: float,
    max_new_tokens: int,
    seed: int,
    task: Task | None = None,
    sampler: Sampler | None = None,
    greedy: bool = False,
) -> list[dict[str, Any]]:
    """Sample n responses to each question, as rows of the native rollout format, question by question.

    task: grades them, which adds `reward`, `correct` and `format_ok`; None: no grades.
    sampler: default HFSampler(policy).
    A row also has `level` and `finished` (False: cut off before a stop token). Raises InputError where the task cannot
    grade a response, and for more than MOST_RESPONSES.
    """
    questions = list(questions)
    check_count(len(questions), n)
    prompts = [policy.encode_prompt(question.prompt) for question in questions]
    sampled = (HFSampler(policy) if sampler is None else sampler).sample(
        prompts,
        n=n,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        generator=_make_generator(seed),
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
    """Return a torch generator; seeds beyond 64 bits are mixed down."""
    if seed >= 2**64:
        seed = int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0])
    return torch.Generator().manual_seed(seed)


def batch_rows(rows: Iterable[dict[str, Any]], *, on_policy: bool = True) -> TokenBatch:
    """Return the rows of `rollout_rows` as a batch; on_policy: drop the sampler's log-probabilities."""
    names = ["prompt_ids", "response_ids", "group", "temperature"] + ([] if on_policy else ["old_logprobs"])
    return collate([Response(**{name: row[name] for name in names}, reward=row.get("reward")) for row in rows])
