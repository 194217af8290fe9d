"""Randomly generated sums and differences: math problems for policies that only write characters.

The embedded policies' tokenizers cover every prompt and answer, but these policies were trained only on puzzles and
know no arithmetic: with them, the task shows that everything runs, not that anything is learnt.
"""

from __future__ import annotations

import random
import re

from gradscope.tasks.math import agrees
from gradscope.tasks.registry import Grade, Question

DIGITS = (1, 2, 3)
"""Number of digits by level."""


class _Arithmetic:
    """The task.

    >>> [(question.prompt, question.answer) for question in arithmetic.questions(3, seed=0)]
    [('7+7=', ('14',)), ('43-75=', ('-32',)), ('514-902=', ('-388',))]
    """

    name = "arithmetic"

    def questions(self, n: int | None, *, seed: int) -> list[Question]:
        """Return `n` sums and differences, with numbers of digits cycling through DIGITS."""
        rng = random.Random(seed)
        return [self._question(DIGITS[i % len(DIGITS)], rng) for i in range(n)]

    def _question(self, digits: int, rng: random.Random) -> Question:
        one, other = (rng.randrange(10 ** (digits - 1), 10**digits) for _ in range(2))
        sign = rng.choice("+-")
        return Question(f"{one}{sign}{other}=", (str(one + other if sign == "+" else one - other),), level=digits)

    def reward(self, response: str, question: Question) -> float:
        """Return 1 if the answer is right, else 0."""
        return self.grade(response, question).reward

    def grade(self, response: str, question: Question) -> Grade:
        """Grade the whole response as the answer. Good form is a bare integer, and nothing else can be right, since
        math-verify would accept 12+7 as the answer to 12+7=.
        """
        answer = response.strip()
        format_ok = re.fullmatch(r"-?[0-9]+", answer) is not None
        right = format_ok and agrees(answer, question.answer)
        return Grade(float(right), correct=right, format_ok=format_ok)


arithmetic = _Arithmetic()
