"""Sums and differences of several numbers, computed from left to right: the math problems of scale cpu.

    47+5-8+6:   →   47+5=52-8=44+6=50 =50

The first number and every result are non-negative and have at most two digits, the others one. The answer is the whole
number that ends the response, after " =" or, if the steps are omitted, after a leading "=". As with the paper's math
problems it earns 1 if right, else 0; the steps earn nothing. Each question belongs to training or to the test.
"""

from __future__ import annotations

import random
import re
import zlib

from gradscope.tasks import Grade, Question, Task, register

STEPS = (2, 3, 4, 5, 6)
"""Levels, in turn: how many numbers are added or subtracted."""
_ANSWER = re.compile(r"(?:^| )=([0-9]{1,4})")


def draw_terms(steps: int, rng: random.Random) -> list[int]:
    """Draw the first number (0 to 99) and one-digit terms; every partial result is 0 to 99."""
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
    """Write the steps and the answer.

    noise: share of steps whose result is off by 1 or by 10; the next step continues from there, within 0 to 99.

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
    """Return whether a question belongs to the test: one fifth of all, by a hash of their text."""
    return zlib.crc32(prompt.encode()) % 5 == 0


class _Sums:
    """Questions of one side."""

    def __init__(self, name: str, *, test: bool) -> None:
        self.name, self.test = name, test

    def questions(self, n: int | None, *, seed: int) -> list[Question]:
        """Return n different questions, whose number of steps cycles through STEPS."""
        rng, dealt = random.Random(seed), {}
        while len(dealt) < n:
            level = STEPS[len(dealt) % len(STEPS)]
            terms = draw_terms(level, rng)
            prompt = write_question(terms)
            if is_of_test(prompt) == self.test:
                dealt[prompt] = Question(prompt, sum(terms), level=level)
        return list(dealt.values())

    def reward(self, response: str, question: Question) -> float:
        """Return 1 for the right answer, else 0."""
        return self.grade(response, question).reward

    def grade(self, response: str, question: Question) -> Grade:
        """Grade form (an answer ends the response) and correctness, which requires it."""
        *_, found = [None, *_ANSWER.finditer(response)]
        format_ok = found is not None and found.end() == len(response)
        right = format_ok and int(found[1]) == question.answer
        return Grade(float(right), correct=right, format_ok=format_ok)


TRAIN: Task = register(_Sums("sums-train", test=False))
TEST: Task = register(_Sums("sums-test", test=True))
