"""Word problems dealt to training, validation or test, which share none."""

from __future__ import annotations

import random
import zlib

from gradscope.tasks import Grade, Question, Task, get_task, register
from gradscope.tasks.word_problems import LEVELS, draw_problem


def fifth_of(text: str) -> int:
    """Return a problem's fifth, 0 to 4, by a hash of its words."""
    return zlib.crc32(text.encode()) % 5


class _Dealt:
    """Problems of some fifths, asked and graded like `word-problems`."""

    def __init__(self, name: str, *fifths: int) -> None:
        self.name, self.fifths, self.task = name, fifths, get_task("word-problems")

    def questions(self, n: int | None, *, seed: int) -> list[Question]:
        """Return n different problems, whose level cycles through LEVELS."""
        rng, dealt = random.Random(seed), {}
        while len(dealt) < n:
            problem = draw_problem(LEVELS[len(dealt) % len(LEVELS)], rng)
            if fifth_of(problem.text) in self.fifths:
                dealt[problem.text] = self.task.question(problem)
        return list(dealt.values())

    def reward(self, response: str, question: Question) -> float:
        return self.task.reward(response, question)

    def grade(self, response: str, question: Question) -> Grade:
        return self.task.grade(response, question)


TRAIN: Task = register(_Dealt("word-problems-train", 2, 3, 4))
VALIDATION: Task = register(_Dealt("word-problems-validation", 1))
TEST: Task = register(_Dealt("word-problems-test", 0))
