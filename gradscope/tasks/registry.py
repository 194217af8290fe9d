"""What a task is, and the register from which it is taken by name."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from gradscope.errors import InputError


@dataclass(frozen=True)
class Question:
    """One prompt and what its reward needs."""

    prompt: str | list[dict[str, str]]
    """Text that the policy continues as it is, or chat messages, which the tokenizer's template turns into text."""
    answer: Any
    """What the task's reward compares with; for Knights & Knaves `{"names": …, "solution": …}`."""
    level: int | None = None
    """Difficulty, where the task has one; for Knights & Knaves the number of people."""


@dataclass(frozen=True)
class Grade:
    """What a response is worth."""

    reward: float
    """What the trainer maximises."""
    correct: bool
    """Whether the answer is right."""
    format_ok: bool | None = None
    """Whether the answer has the form that the task asks for; None: it asks for none."""


@runtime_checkable
class Task(Protocol):
    """What a task offers; any object with these three members is one.

    A task may also have `grade(response, question) -> Grade`, which tells right answers and good form apart from the
    reward; without it a response is right if its reward is above 0.
    """

    name: str
    """The name that `--task` takes."""

    def questions(self, n: int | None, *, seed: int, **options: Any) -> list[Question]:
        """The `n` questions that belong to `seed` (None: all that its files hold); the options are the task's own."""
        ...

    def reward(self, response: str, question: Question) -> float:
        """What the response (the continuation alone, without the prompt) earns."""
        ...


_tasks: dict[str, Task] = {}
_files_read: set[Path] = set()


def register(task: Any) -> Any:
    """Make a Task known under its name; a later one of the same name takes its place. Returns the task.

    Raises InputError if the object lacks what a Task has.
    """
    if not isinstance(task, Task):
        raise InputError(f"{task!r} is not a task; it needs name, questions(n, *, seed) and reward(response, question)")
    _tasks[task.name] = task
    return task


def task_names() -> list[str]:
    """The names that `get_task` knows by now, sorted.

    >>> task_names()[:2]
    ['arithmetic', 'knights-knaves']
    """
    return sorted(_tasks)


def get_task(name: str) -> Task:
    """The task registered as `name`; `path/to/file.py:NAME` first runs that file, which registers its tasks.

    Raises InputError if the file does not exist or nothing of that name is registered.

    >>> get_task("knights-knaves").name
    'knights-knaves'
    """
    if name in _tasks:
        return _tasks[name]
    file, colon, task_name = name.rpartition(":")
    if colon and file.endswith(".py"):
        _run_file(Path(file))
        name = task_name
    if name not in _tasks:
        raise InputError(f"no task is called {name!r}; known: {', '.join(task_names())}, or path/to/file.py:NAME")
    return _tasks[name]


def grade_response(task: Task, response: str, question: Question) -> Grade:
    """The task's own grade or, if it has none, one made of its reward.

    Raises InputError, with the response's first characters, if the task raises or its reward is not a finite number.
    """
    try:
        if hasattr(task, "grade"):
            grade = task.grade(response, question)
        else:
            reward = float(task.reward(response, question))
            grade = Grade(reward, correct=reward > 0)
    except Exception as error:  # the task is the user's code: whatever it raises, they are told where
        raise InputError(
            f"the reward of task {task.name!r} raised {type(error).__name__} ({error}) on the response "
            f"{response[:60]!r}; mend the task"
        ) from error
    if not math.isfinite(grade.reward):
        raise InputError(
            f"the reward of task {task.name!r} is {grade.reward} on the response {response[:60]!r}; give finite numbers"
        )
    return grade


def _run_file(file: Path) -> None:
    file = file.resolve()
    if file in _files_read:
        return
    if not file.is_file():
        raise InputError(f"task file {file} does not exist; give path/to/file.py:NAME with an existing file")
    spec = importlib.util.spec_from_file_location(f"_gradscope_task_{len(_files_read)}_{file.stem}", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look a class's module up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[spec.name]
        raise
    _files_read.add(file)


def questions_hash(questions: Sequence[Question]) -> str:
    """SHA-256 of what was asked and what the answers are."""
    rows = [[question.prompt, question.answer, question.level] for question in questions]
    return hashlib.sha256(json.dumps(rows, default=str).encode()).hexdigest()
