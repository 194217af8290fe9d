"""Randomly generated word problems of one or two steps, short enough to sample and train pretrained models of some
hundred million parameters on a CPU.

A problem has at most 40 tokens for such models, a worked answer 15 to 25. `word-problems` gives a chat of one message,
for chat models; `word-problems-plain` its text, for base models. `word-problems-examples` prepends two worked problems
and rewards good form with a tenth, so that even a model that can hardly add gets rewards that differ within a group.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from gradscope.tasks.registry import Grade, Question

LEVELS = (1, 2, 3)
"""Levels: one sum or difference; two of them; a product and then a sum or difference."""
INSTRUCTION = "End with: The answer is N."
EXAMPLES = (
    "Leo owns 10 books. He finds 13 more. How many books is that? 10 + 13 = 23. The answer is 23.\n"
    "Kate has 30 eggs and breaks 4. How many eggs does she have now? 30 - 4 = 26. The answer is 26.\n"
)
FORM = 0.1
"""Reward for good form after EXAMPLES."""
_PEOPLE = (
    *(("Mia", "she"), ("Tom", "he"), ("Anna", "she"), ("Ben", "he"), ("Lucy", "she"), ("Sam", "he"), ("Kate", "she")),
    *(("Max", "he"), ("Emma", "she"), ("Jack", "he"), ("Sara", "she"), ("Paul", "he"), ("Jane", "she"), ("Leo", "he")),
)
_THINGS = (
    *("apples", "books", "pens", "coins", "cards", "stamps", "shells", "marbles", "eggs", "balls", "toys", "cakes"),
    *("stones", "flowers", "keys", "cups"),
)
_OPENINGS = ("{name} has {count}", "{name} starts with {count}", "{name} owns {count}", "{name} counts {count}")
_GROUPS = ("{n} boxes of {each} {things}", "{n} bags with {each} {things} each", "{n} packs of {each} {things}")
_GAINS = ("buys {n} more", "finds {n} more", "gets {n} more", "adds {n}", "wins {n}", "is given {n}")
_LOSSES = ("loses {n}", "sells {n}", "gives away {n}", "breaks {n}", "drops {n}", "throws away {n}")
_LINKS = (" and ", ", then ", " and then ")
_ENDS = ("How many {things} does {she} have now?", "How many {things} is that?", "How many are there at the end?")
_QUESTION_FIRST = "How many {things} does {name} have if {she} {changes}?"
_ANSWER = re.compile(r"answer(?: is)?:?\s*[*$]*(-?[0-9]+)(?![0-9]|[.,/][0-9])", re.IGNORECASE)


@dataclass(frozen=True)
class Problem:
    """A problem's words and the steps that solve it."""

    text: str
    """The problem without the instruction."""
    start: int
    """The first number."""
    steps: tuple[tuple[str, int], ...]
    """Operations on the number so far: "+", "-" or "*", and the operand."""
    level: int
    """One of LEVELS."""

    @property
    def results(self) -> tuple[int, ...]:
        """The number after each step; none is below 1 or above 99. The last is the answer."""
        number, results = self.start, []
        for sign, by in self.steps:
            number = number * by if sign == "*" else number + by if sign == "+" else number - by
            results.append(number)
        return tuple(results)


def draw_problem(level: int, rng: random.Random) -> Problem:
    """Draw numbers and wording of a problem of one level.

    >>> problem = draw_problem(3, random.Random(0))
    >>> problem.text
    'Leo counts 8 bags with 2 stones each. He breaks 15. How many stones is that?'
    >>> problem.start, problem.steps, problem.results
    (8, (('*', 2), ('-', 15)), (16, 1))
    """
    (name, she), things = rng.choice(_PEOPLE), rng.choice(_THINGS)
    start = rng.randint(2, 9) if level == 3 else rng.randint(5, 49)
    steps = [("*", rng.randint(2, 9))] if level == 3 else []
    total, changes = start * steps[0][1] if steps else start, []
    for _ in range(2 if level == 2 else 1):
        sign, by = rng.choice("+-") if total > 2 else "+", rng.randint(2, 18)
        by = min(by, total - 1) if sign == "-" else by
        total += by if sign == "+" else -by
        steps.append((sign, by))
        changes.append(rng.choice(_GAINS if sign == "+" else _LOSSES).format(n=by))
    form, each = (rng.choice(_GROUPS), steps[0][1]) if level == 3 else ("{n} {things}", None)
    count = form.format(n=start, each=each, things=things)
    told = rng.choice(_LINKS).join(changes)
    if level != 3 and rng.random() < 0.25:
        changes = f"has {start}{rng.choice(_LINKS)}{told}"
        text = _QUESTION_FIRST.format(things=things, name=name, she=she, changes=changes)
    else:
        opening = rng.choice(_OPENINGS).format(name=name, count=count)
        end = rng.choice(_ENDS).format(things=things, she=she)
        text = f"{opening}. {she.capitalize()} {told}. {end}"
    return Problem(text, start, tuple(steps), level)


class _WordProblems:
    """The same problems as a chat, as text, or as text after worked examples.

    >>> (question,) = word_problems_plain.questions(1, seed=2)
    >>> question.prompt, question.answer
    ('Leo owns 10 books. He finds 13 more. How many books is that? End with: The answer is N.', ('23',))
    """

    def __init__(self, name: str, *, chat: bool = False, examples: bool = False) -> None:
        self.name, self.chat, self.examples = name, chat, examples

    def questions(self, n: int | None, *, seed: int, levels: Sequence[int] = LEVELS) -> list[Question]:
        """Return `n` problems, whose level cycles through `levels`."""
        rng = random.Random(seed)
        return [self.question(draw_problem(levels[i % len(levels)], rng)) for i in range(n)]

    def question(self, problem: Problem) -> Question:
        """Return the problem with the instruction or after the examples, and its answer."""
        text = EXAMPLES + problem.text if self.examples else f"{problem.text} {INSTRUCTION}"
        prompt = [{"role": "user", "content": text}] if self.chat else text
        return Question(prompt, (str(problem.results[-1]),), level=problem.level)

    def reward(self, response: str, question: Question) -> float:
        """Return 1 if the answer is right, else 0; after examples, plus FORM for good form."""
        return self.grade(response, question).reward

    def grade(self, response: str, question: Question) -> Grade:
        """Grade the integer after the last "answer is" or "answer:"; good form means that there is one.

        After examples only the first line counts, since models continue with further problems.
        """
        if self.examples:
            response = response.strip().partition("\n")[0]
        *_, found = [None, *_ANSWER.finditer(response)]
        right = found is not None and found[1].lstrip("0") == question.answer[0]
        form = FORM if self.examples and found is not None else 0.0
        return Grade(right + form, correct=right, format_ok=found is not None)


word_problems = _WordProblems("word-problems", chat=True)
word_problems_plain = _WordProblems("word-problems-plain")
word_problems_examples = _WordProblems("word-problems-examples", examples=True)
