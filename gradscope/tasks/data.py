"""Files of questions: finding and reading them, and drawing questions from them or from a generator."""

from __future__ import annotations

import glob
import inspect
import os
import random
from collections.abc import Iterable, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any, TypeVar

from gradscope.errors import InputError
from gradscope.runs import RAISED, in_words, read_parquet
from gradscope.tasks.registry import Question, Task

T = TypeVar("T")


def data_folder() -> Path:
    """Return `$GRADSCOPE_DATA`, or by default `shared/data` beside the repository; it need not exist."""
    if given := os.environ.get("GRADSCOPE_DATA"):
        return Path(given)
    return Path(__file__).resolve().parents[2].parent / "shared" / "data"


def draw_questions(task: Task, n: int | None, *, seed: int, **options: Any) -> list[Question]:
    """Call `task.questions(n, seed=seed, **options)` without options that are None or empty; return at least one
    question.

    n: None for all questions that the files of the option `files` hold.

    Raises InputError if the task does not take an option, n is below 1, there are no questions, or the task raises or
    gives something else.
    """
    options = {name: value for name, value in options.items() if value is not None and value != () and value != []}
    _check_options(task, options)
    if n is None and "files" not in options:
        raise InputError(f"task {task.name!r} has neither a number of questions nor files; give one of them")
    if n is not None and n < 1:
        raise InputError(f"{n} questions requested; give 1 or more")
    try:
        given = task.questions(n, seed=seed, **options)
        questions = list(given) if isinstance(given, Iterable) else [given]
    except InputError:
        raise
    except RAISED as error:
        raise InputError(
            f"questions(n={n}, seed={seed}) of task {task.name!r} raised {in_words(error)}; mend the task"
        ) from error
    for question in questions:
        if not isinstance(question, Question) or not isinstance(question.level, Integral | None):
            raise InputError(
                f"the questions of task {task.name!r} hold {question!r:.80}; wanted a list of Question(prompt, answer, "
                "level), whose level is a whole number or None"
            )
    if not questions:
        raise InputError(f"task {task.name!r} has no questions for n = {n}, {options}; give it others")
    return questions


def _check_options(task: Task, options: dict[str, Any]) -> None:
    try:
        parameters = inspect.signature(task.questions).parameters.values()
    except (TypeError, ValueError) as error:
        raise InputError(f"the questions of task {task.name!r} are no function: {in_words(error)}; mend it") from error
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    known = [parameter.name for parameter in parameters if parameter.name not in ("n", "seed")]
    if unknown := [name for name in options if name not in known]:
        takes = f"it takes {', '.join(known)}" if known else "it takes none"
        raise InputError(f"task {task.name!r} has no option {', '.join(unknown)}; {takes}")


def draw_rows(rows: Sequence[T], n: int | None, rng: random.Random, files: Sequence[str | Path]) -> list[T]:
    """Draw `n` different rows (None: all) of the files in random order. Raises InputError if there are too few."""
    source = ", ".join(map(str, files))
    if not rows:
        raise InputError(f"{source}: there are no matching rows; give files with suitable rows")
    if n is not None and not 0 <= n <= len(rows):
        raise InputError(f"{n} questions asked for, but {source} has {len(rows)}; ask for at most that many")
    return rng.sample(rows, len(rows) if n is None else n)


def read_rows(files: Sequence[str | Path], columns: Sequence[str]) -> list[tuple[str, dict[str, Any]]]:
    """Return (place, values of these columns) for each row of the parquet files that `find_files` finds.

    The values are plain Python: lists, dictionaries and None.
    Raises InputError if a file is not there, not parquet, or lacks a column.
    """
    rows = []
    for path in find_files(files):
        rows += [(f"{path}, row {index}", row) for index, row in enumerate(read_parquet(path, columns))]
    return rows


def find_files(patterns: Sequence[str | Path]) -> list[Path]:
    """Expand patterns (`*`, `**`), as given or below `data_folder()`. Raises InputError for one without matches."""
    found: dict[Path, Path] = {}
    for pattern in [patterns] if isinstance(patterns, (str, Path)) else patterns:
        places = [Path(pattern), data_folder() / pattern]
        paths = _files_at(places[0]) or _files_at(places[1])
        if not paths:
            raise InputError(
                f"no file matches {pattern}: looked at {places[0].absolute()} and {places[1].absolute()}; give "
                "parquet files (wildcards allowed), or set GRADSCOPE_DATA to the folder that holds them"
            )
        found |= {path.resolve(): path for path in paths if path.resolve() not in found}
    return list(found.values())


def _files_at(place: Path) -> list[Path]:
    # An existing file of that name comes first: brackets in its name would be special for glob.
    if os.path.isfile(place):  # of a name that is too long, Path raises
        return [place]
    return [Path(path) for path in sorted(glob.glob(str(place), recursive=True)) if os.path.isfile(path)]
