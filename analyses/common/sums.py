"""Sums and differences of several numbers, worked out from left to right: the math problems of scale cpu.

    47+5-8+6:   →   47+5=52-8=44+6=50 =50

The first number and every result have at most two digits and no sign, the others one digit. The answer is the whole
number that ends the response, after " =" or, where the steps are left out, after a "=" that begins it. It earns 1 if
it is right, else 0, as with the paper's math problems; the steps earn nothing. Questions are dealt to training or to
the test, which therefore have none in common.
"""

from __future__ import annotations

import random
import re
import zlib

from gradscope.tasks import Grade, Question, Task, register
from gradscope.tasks.data import raise_no_number

STEPS = (2, 3, 4, 5, 6)
"""The levels, in turn: how many numbers are added or taken away."""
_ANSWER = re.compile(r"(?:^| )=([0-9]{1,4})")


def draw_terms(steps: int, rng: random.Random) -> list[int]:
    """The first number (0 to 99), then what is added to it, all of one digit; every result on the way is 0 to 99."""
    terms = [rng.randrange(100)]
    for _ in range(steps):
        total = sum(terms)
        terms.append(rng.choice([term for term in range(-9, 10) if term and 0 <= total + term <= 99]))
    return terms


def write_question(terms: list[int]) -> str:
    """
    >>> write_question([47, 5, -8, 6])
    '47+5-8+6:'
    """
    return str(terms[0]) + "".join(f"{term:+d}" for term in terms[1:]) + ":"


def write_steps(terms: list[int], *, rng: random.Random, noise: float = 0.0) -> str:
    """The steps and the answer.

    noise: share of steps whose result is off by 1 or by 10; the next goes on from there, and none leaves 0 to 99.

    >>> write_steps([47, 5, -8, 6], rng=random.Random(0))
    '47+5=52-8=44+6=50 =50'
    """
    text, total = str(terms[0]), terms[0]
    for number, term in enumerate(terms[1:], start=2):
        total += term
        if rng.random() < noise:
            ahead = [sum(terms[number:end]) for end in range(number, len(terms) + 1)]
            slips = [total + slip for slip in (-10, -1, 1, 10)]
            total = rng.choice([slip for slip in slips if all(0 <= slip + more <= 99 for more in ahead)] or [total])
        text += f"{term:+d}={total}"
    return f"{text} ={total}"


def is_of_test(prompt: str) -> bool:
    """Whether a question is the test's, as one fifth of all are, by a hash of their text."""
    return zlib.crc32(prompt.encode()) % 5 == 0


class _Sums:
    """The questions of one side."""

    def __init__(self, name: str, *, test: bool) -> None:
        self.name, self.test = name, test

    def questions(self, n: int | None, *, seed: int) -> list[Question]:
        """n different questions, whose number of steps cycles through STEPS."""
        if n is None:
            raise_no_number(self.name)
        rng, dealt = random.Random(seed), {}
        while len(dealt) < n:
            level = STEPS[len(dealt) % len(STEPS)]
            terms = draw_terms(level, rng)
            prompt = write_question(terms)
            if is_of_test(prompt) == self.test:
                dealt[prompt] = Question(prompt, sum(terms), level=level)
        return list(dealt.values())

    def reward(self, response: str, question: Question) -> float:
        """1 if the answer is right, else 0."""
        return self.grade(response, question).reward

    def grade(self, response: str, question: Question) -> Grade:
        """Good form is an answer that ends the response, and only that can be right."""
        *_, found = [None, *_ANSWER.finditer(response)]
        format_ok = found is not None and found.end() == len(response)
        right = format_ok and int(found[1]) == question.answer
        return Grade(float(right), correct=right, format_ok=format_ok)


TRAIN: Task = register(_Sums("sums-train", test=False))
TEST: Task = register(_Sums("sums-test", test=True))
