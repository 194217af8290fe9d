"""What a task is, and the register from which it is taken by name."""

from __future__ import annotations

import importlib.util
import sys
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


@runtime_checkable
class Task(Protocol):
    """What a task offers; any object with these three members is one."""

    name: str
    """The name that `--task` takes."""

    def questions(self, n: int, *, seed: int, **options: Any) -> list[Question]:
        """The `n` questions that belong to `seed`; the options are the task's own."""
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
    ['knights-knaves', 'knights-knaves-compact']
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
