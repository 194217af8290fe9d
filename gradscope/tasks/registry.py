"""The interface of a task, and the registry of tasks by name."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from gradscope.errors import InputError
from gradscope.runs import RAISED, in_words, run_file


@dataclass(frozen=True)
class Question:
    """A prompt, with the data that its reward needs."""

    prompt: str | list[dict[str, str]]
    """Text for the policy to continue, or chat messages, which go through the tokenizer's template."""
    answer: Any
    """Data for the task's reward; for Knights & Knaves `{"names": …, "solution": …}`."""
    level: int | None = None
    """Difficulty, if the task has one; for Knights & Knaves the number of people."""


@dataclass(frozen=True)
class Grade:
    """The grade of one response."""

    reward: float
    """The reward that the trainer maximises."""
    correct: bool
    """Whether the answer is right."""
    format_ok: bool | None = None
    """Whether the answer has the required form; None for tasks without one."""


@runtime_checkable
class Task(Protocol):
    """Interface of a task; any object with these three members is one.

    A task may also have `grade(response, question) -> Grade`, which reports correctness and form separately from the
    reward; without it a response is right if its reward is above 0.
    """

    name: str
    """Name for `--task`."""

    def questions(self, n: int | None, *, seed: int, **options: Any) -> list[Question]:
        """Return the `n` questions of `seed` (None: all in its files); options are task-specific."""
        ...

    def reward(self, response: str, question: Question) -> float:
        """Return the reward of the response (the continuation, without the prompt)."""
        ...


_tasks: dict[str, Task] = {}


def register(task: Any) -> Any:
    """Register a Task under its name, replacing any other; return it. Raises InputError if it is no Task."""
    callables = [getattr(task, name) for name in ("questions", "reward", "grade") if hasattr(task, name)]
    if not (isinstance(task, Task) and isinstance(task.name, str) and task.name and all(map(callable, callables))):
        raise InputError(
            f"{task!r} is not a task; it needs name (a string), questions(n, *, seed) and reward(response, question)"
        )
    _tasks[task.name] = task
    return task


def task_names() -> list[str]:
    """Return the registered names, sorted.

    >>> {"arithmetic", "knights-knaves", "math"} <= set(task_names())
    True
    """
    return sorted(_tasks)


def get_task(name: str) -> Task:
    """Return the task registered as `name`, or the one that `path/to/file.py:NAME` registers or defines.

    Raises InputError if the file does not exist or nothing of that name is there.

    >>> get_task("knights-knaves").name
    'knights-knaves'
    """
    if name in _tasks:
        return _tasks[name]
    file, colon, task_name = name.rpartition(":")
    if colon and file.endswith(".py"):
        own = getattr(run_file(Path(file), "task"), task_name, None)
        # The file's task comes first, even if another task of that name is registered.
        if own is not None and (task_name not in _tasks or (isinstance(own, Task) and not isinstance(own, type))):
            return register(own)
        name = task_name
    if name not in _tasks:
        raise InputError(
            f"no task is called {name!r}; known: {', '.join(task_names())}, or path/to/file.py:NAME, with NAME a "
            "variable of that file"
        )
    return _tasks[name]


def grade_response(task: Task, response: str, question: Question) -> Grade:
    """Grade a response by the task's own `grade` or, if it has none, by its reward.

    Raises InputError, with the response's first characters, if the task raises, its reward is not a finite number, or
    its grade is not a Grade of such values.
    """
    try:
        if hasattr(task, "grade"):
            grade = task.grade(response, question)
        else:
            reward = float(task.reward(response, question))
            grade = Grade(reward, correct=reward > 0)
        wanted = _wanted_of_grade(grade)
    except RAISED as error:
        raise InputError(
            f"the reward of task {task.name!r} raised {in_words(error)} on the response {response[:60]!r}; mend the "
            "task"
        ) from error
    if wanted is not None:
        raise InputError(
            f"the reward of task {task.name!r} gave {grade!r:.80} for the response {response[:60]!r}; wanted {wanted}"
        )
    format_ok = None if grade.format_ok is None else bool(grade.format_ok)
    return Grade(float(grade.reward), bool(grade.correct), format_ok)


def _wanted_of_grade(grade: Any) -> str | None:
    """Describe what an invalid grade should have been; None if it is valid."""
    if not isinstance(grade, Grade):
        return "Grade(reward, correct, format_ok)"
    if not hasattr(grade.reward, "__float__") or not math.isfinite(grade.reward):
        return "a finite number as reward"
    if grade.correct not in (True, False):
        return "True or False as correct"
    return None if grade.format_ok in (None, True, False) else "True, False or None as format_ok"


def questions_hash(questions: Sequence[Question]) -> str:
    """Return the SHA-256 of the questions and their answers."""
    rows = [[question.prompt, question.answer, question.level] for question in questions]
    return hashlib.sha256(json.dumps(rows, default=str).encode()).hexdigest()
