"""Compact Knights & Knaves puzzles dealt to training, validation or test, which share none."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence

from gradscope.errors import InputError
from gradscope.tasks import Grade, Question, Task, get_task, register
from gradscope.tasks.knights_knaves import Puzzle, generate_puzzle
from gradscope.tasks.knights_knaves_wording import Statement, compact_prompt

PATIENCE = 20_000
"""Draws without a new puzzle after which a number of people counts as used up; the rarest comes once in some 600."""


def fifth_of(statements: Sequence[Statement]) -> int:
    """Return a puzzle's fifth, 0 to 4, whatever the people's names."""
    return zlib.crc32(compact_prompt(statements).encode()) % 5


def is_for_test(statements: Sequence[Statement]) -> bool:
    """Return whether a puzzle is in the test's fifth."""
    return fifth_of(statements) == 0


class _Dealt:
    """Puzzles of some fifths, with canonical names or, if `named`, names drawn from the data set's for each."""

    def __init__(self, name: str, *fifths: int, named: bool = False) -> None:
        self.name, self.fifths, self.named, self.task = name, fifths, named, get_task("knights-knaves-compact")

    def questions(self, n: int, *, seed: int, people: tuple[int, ...] = (2, 3, 4)) -> list[Question]:
        """Return n different puzzles with a cycling number of people; a number whose puzzles are used up is skipped.

        Raises InputError if there are not enough.
        """
        rng, dealt, levels, vain = random.Random(seed), {}, list(people), 0
        while len(dealt) < n:
            if vain == PATIENCE:
                levels.remove(level)
                vain = 0
            if not levels:
                raise InputError(f"task {self.name!r} has {len(dealt)} puzzles of {people} people; ask for no more")
            level, before = levels[len(dealt) % len(levels)], len(dealt)
            puzzle = generate_puzzle(level, random.Random(rng.getrandbits(62)))
            if fifth_of(puzzle.statements) in self.fifths:
                question = self.question(puzzle)
                dealt[question.prompt] = question
            vain = 0 if len(dealt) > before else vain + 1
        return list(dealt.values())

    def question(self, puzzle: Puzzle) -> Question:
        """Return the puzzle in this task's words."""
        if not self.named:
            return self.task.question(puzzle)
        answer = {"names": puzzle.names, "solution": puzzle.solution}
        return Question(compact_prompt(puzzle.statements, puzzle.names), answer, level=len(puzzle.names))

    def reward(self, response: str, question: Question) -> float:
        return self.task.reward(response, question)

    def grade(self, response: str, question: Question) -> Grade:
        return self.task.grade(response, question)


TRAIN: Task = register(_Dealt("kk-compact-train", 1, 2, 3, 4))
FIT: Task = register(_Dealt("kk-compact-fit", 2, 3, 4))
VALIDATION: Task = register(_Dealt("kk-compact-validation", 1))
TEST: Task = register(_Dealt("kk-compact-test", 0))
NAMED_TRAIN: Task = register(_Dealt("kk-named-train", 1, 2, 3, 4, named=True))
NAMED_TEST: Task = register(_Dealt("kk-named-test", 0, named=True))
