"""Check that the questions for training and test are there, and that their reference answers earn the full reward."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import pandas as pd
from tqdm import tqdm

from gradscope.errors import InputError
from gradscope.tasks import Question, draw_questions, get_task, grade_response
from gradscope.tasks.data import data_folder, find_files, read_rows
from gradscope.tasks.knights_knaves import read_puzzles
from gradscope.tasks.math import verifies

State = Literal["ok", "absent", "fails"]
ALL_RIGHT = 3.0
"""Reward of a right, well-formatted answer to a puzzle."""
KIND_OF_FILE = {
    "knights-knaves": "puzzles as in kk/3ppl/train.parquet (names, statements, solution, quiz)",
    "math-plain": "problems in verl's layout (prompt, a chat of one message; reward_model.ground_truth)",
}
"""Contents of a task's files, for whoever has to provide one."""


@dataclass(frozen=True)
class Check:
    """A check and its result."""

    subject: str
    """A data set or a track."""
    what: str
    state: State
    """"absent": missing, or unknown because something is missing; "fails": present but invalid."""
    detail: str


@dataclass(frozen=True)
class DataSet:
    """A task's questions in files."""

    task: str
    data: tuple[str, ...]

    @property
    def name(self) -> str:
        return ", ".join(self.data)


def check_files(dataset: DataSet) -> Check:
    """Check that every pattern matches a file; if not, say what to put where."""
    missing = []
    for pattern in dataset.data:
        try:
            find_files([pattern])
        except InputError:
            missing.append(pattern)
    if not missing:
        return Check(dataset.name, "files", "ok", f"{len(find_files(dataset.data))}")
    held = KIND_OF_FILE.get(dataset.task, f"questions of task {dataset.task}")
    places = ", ".join(str(data_folder() / pattern) for pattern in missing)
    return Check(dataset.name, "files", "absent", f"put {held} at {places}, or set GRADSCOPE_DATA")


def check_questions(dataset: DataSet) -> tuple[Check, list[Question]]:
    """Read every row as a question; count them by level and measure their prompts."""
    try:
        questions = draw_questions(get_task(dataset.task), None, seed=0, files=dataset.data)
    except InputError as error:
        return Check(dataset.name, "questions", "fails", str(error)), []
    levels = Counter(question.level for question in questions if question.level is not None)
    by_level = "".join(f", {count} of level {level}" for level, count in sorted(levels.items()))
    return Check(dataset.name, "questions", "ok", f"{len(questions):,} rows{by_level}; {lengths(questions)}"), questions


def lengths(questions: Sequence[Question]) -> str:
    """Return the prompts' lengths in characters."""
    sizes = [len(text_of(question)) for question in questions]
    return f"prompts of {min(sizes):,} to {max(sizes):,} characters, median {statistics.median(sizes):,.0f}"


def text_of(question: Question) -> str:
    """Return the prompt without a template."""
    prompt = question.prompt
    return prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)


def check_answers(dataset: DataSet, rows: int, *, progress: bool) -> tuple[Check, pd.DataFrame]:
    """Grade the reference answers of all rows by the task's reward; those of math also by math-verify alone.

    The table has a row for each wrong one: file, row, answer and reason.
    """
    puzzles = dataset.task.startswith("knights-knaves")
    told = _answers_to_puzzles(dataset) if puzzles else _answers_to_problems(dataset)
    task, wanted = get_task(dataset.task), ALL_RIGHT if puzzles else 1.0
    total, failed, listed = 0, 0, []
    with tqdm(total=rows, desc=dataset.name, unit="row", disable=None if progress else True, leave=False) as bar:
        for place, question, answers in told:
            for answer, response in answers:
                total += 1
                earned = grade_response(task, response, question).reward
                if earned != wanted:
                    failed += 1
                    listed.append((*_split(place), answer, f"earns {earned:g}"))
                elif not puzzles and not verifies(answer):
                    listed.append((*_split(place), answer, "not verified: right only as the same text"))
            bar.update()
    table = pd.DataFrame(listed, columns=["file", "row", "answer", "why"])
    detail = f"{total - failed:,} of {total:,} reference answers earn {wanted:g}"
    if not puzzles:
        detail += f"; {len(table) - failed:,} of them only as the same text, which math-verify cannot verify"
    return Check(dataset.name, "answers", "fails" if failed else "ok", detail), table


Told = tuple[str, Question, list[tuple[str, str]]]
"""Place of a row, its question, and its reference answers, each with a response that gives it."""


def _answers_to_puzzles(dataset: DataSet) -> Iterator[Told]:
    """Return each row's solution as the end of a response."""
    task, rows = get_task(dataset.task), read_rows(dataset.data, ("reward_model",))
    for puzzle, (place, row) in zip(read_puzzles(*dataset.data), rows, strict=True):
        try:
            text = row["reward_model"]["ground_truth"]["solution_text_format"]
        except (TypeError, KeyError) as error:
            raise InputError(f"{place}: reward_model.ground_truth.solution_text_format is missing; add it") from error
        yield place, task.question(puzzle), [(text, f" I try both. </think><answer> {text} </answer>")]


def _answers_to_problems(dataset: DataSet) -> Iterator[Told]:
    """Return every correct answer, boxed."""
    task = get_task(dataset.task)
    for place, row in read_rows(dataset.data, ("prompt", "reward_model")):
        question = task.question(place, row)
        yield place, question, [(truth, rf"So the answer is $\boxed{{{truth}}}$.") for truth in question.answer]


def _split(place: str) -> tuple[str, int]:
    file, _, row = place.rpartition(", row ")
    return file.rpartition(f"{data_folder()}/")[2], int(row)
