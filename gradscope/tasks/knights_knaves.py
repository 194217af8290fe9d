"""Knights & Knaves: puzzles with exactly one solution, generated or read from files, prompts, and the paper's
reward."""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradscope.errors import InputError
from gradscope.tasks.data import draw_rows, read_rows
from gradscope.tasks.knights_knaves_wording import COMPACT_NAMES, SAYINGS, Statement, compact_prompt, quiz_text
from gradscope.tasks.registry import Grade, Question

NAMES = (
    *("Abigail", "Aiden", "Alexander", "Amelia", "Aria", "Aurora", "Ava", "Avery", "Benjamin", "Charlotte", "Chloe"),
    *("Daniel", "David", "Elizabeth", "Ella", "Emily", "Emma", "Ethan", "Evelyn", "Grace", "Harper", "Henry"),
    *("Isabella", "Jack", "Jackson", "Jacob", "James", "Joseph", "Liam", "Lily", "Logan", "Lucas", "Luke", "Mason"),
    *("Matthew", "Mia", "Michael", "Noah", "Oliver", "Olivia", "Owen", "Penelope", "Riley", "Samuel", "Scarlett"),
    *("Sebastian", "Sofia", "Sophia", "Victoria", "William", "Zoey"),
)
"""The people of the data set."""

_PROMPT = (
    "<|im_start|>system\nYou are a helpful assistant. The assistant first thinks about the reasoning process in the "
    "mind and then provides the user with the answer. The reasoning process and answer are enclosed within <think> "
    "</think> and<answer> </answer> tags, respectively, i.e., <think> reasoning process here </think><answer> answer "
    "here </answer>.  Now the user asks you to solve a logical reasoning problem. After thinking, when you finally "
    "reach a conclusion, clearly state the identity of each character within <answer> </answer> tags. i.e., <answer> "
    "(1) Zoey is a knight\n(2) ... </answer>.\n<|im_end|>\n<|im_start|>user\n{quiz}\n<|im_end|>\n"
    "<|im_start|>assistant\n<think>"
)
_TAGS = ("<think>", "</think>", "<answer>", "</answer>")


@dataclass(frozen=True)
class Puzzle:
    """A puzzle: the people, their statements, and who tells the truth."""

    names: tuple[str, ...]
    """Person i's name."""
    statements: tuple[Statement, ...]
    """Person i's claim."""
    solution: tuple[bool, ...]
    """True where person i is a knight."""
    quiz: str
    """The puzzle in the data set's words."""


def solve(statements: Sequence[Statement]) -> list[tuple[bool, ...]]:
    """Return every assignment (True: knight) under which exactly the knights' claims are true, in ascending order.

    >>> solve([("lying", 1), ("<=>", ("telling-truth", 0), ("telling-truth", 1))])
    [(True, False)]
    >>> solve([("lying", 0)])
    []
    """
    people = len(statements)
    # A claim is its truth table over all 2^people assignments, one bit each: connectives become bitwise operators.
    every = (1 << (1 << people)) - 1
    knight = [sum(1 << a for a in range(1 << people) if a >> (people - 1 - i) & 1) for i in range(people)]
    consistent = every
    for speaker, statement in zip(knight, statements, strict=True):
        consistent &= every ^ speaker ^ _truth_table(statement, knight, every)
    assignments = (a for a in range(1 << people) if consistent >> a & 1)
    return [tuple(bool(a >> (people - 1 - i) & 1) for i in range(people)) for a in assignments]


def _truth_table(statement: Statement, knight: Sequence[int], every: int) -> int:
    operator, *parts = statement
    if operator == "telling-truth":
        return knight[parts[0]]
    if operator == "lying":
        return every ^ knight[parts[0]]
    tables = [_truth_table(part, knight, every) for part in parts]
    if operator == "not":
        return every ^ tables[0]
    if operator == "and":
        return tables[0] & tables[1]
    if operator == "or":
        return tables[0] | tables[1]
    if operator == "->":
        return every ^ tables[0] | tables[1]
    if operator == "<=>":
        return every ^ tables[0] ^ tables[1]
    raise InputError(f"unknown operator {operator!r}; give telling-truth, lying, not, and, or, -> or <=>")


def draw_statements(people: int, rng: random.Random) -> tuple[Statement, ...]:
    """Draw claims for 2 to 8 people that have exactly one solution.

    The six kinds of claim (atom, not, and, or, ->, <=>) are equally likely before puzzles without exactly one
    solution are rejected. As in the data set, nobody calls themself a knave, a negation is about somebody else, and
    the two halves of a connective differ, though they may be about the same person.
    """
    if not 2 <= people <= 8:
        raise InputError(f"{people} people requested; give 2 to 8")
    while True:
        statements = tuple(_draw_statement(speaker, people, rng) for speaker in range(people))
        if len(solve(statements)) == 1:
            return statements


def _draw_statement(speaker: int, people: int, rng: random.Random) -> Statement:
    atoms = [("telling-truth", i) for i in range(people)] + [("lying", i) for i in range(people) if i != speaker]
    operator = rng.choice(("atom", "not", "and", "or", "->", "<=>"))
    if operator == "atom":
        return rng.choice(atoms)
    if operator == "not":
        return ("not", rng.choice([atom for atom in atoms if atom[1] != speaker]))
    return (operator, *rng.sample(atoms, 2))


def generate_puzzle(people: int, rng: random.Random, *, names: Sequence[str] | None = None) -> Puzzle:
    """Draw a puzzle with exactly one solution, in the data set's words; `names` default to a draw from NAMES.

    >>> generate_puzzle(2, random.Random(0)).names
    ('Luke', 'Benjamin')
    """
    statements = draw_statements(people, rng)
    names = tuple(names[:people]) if names is not None else tuple(rng.sample(NAMES, people))
    quiz = quiz_text(statements, names, rng.choices(SAYINGS, k=people))  # with replacement, as in the data set
    return Puzzle(names, statements, solve(statements)[0], quiz)


def read_puzzles(*files: str | Path) -> list[Puzzle]:
    """Read puzzles from parquet files of the data set (columns names, statements, solution, quiz), in order."""
    return [_read_puzzle(place, row) for place, row in read_rows(files, ("names", "statements", "solution", "quiz"))]


def _read_puzzle(place: str, row: dict[str, Any]) -> Puzzle:
    try:
        names, statements, solution = tuple(row["names"]), ast.literal_eval(row["statements"]), tuple(row["solution"])
    except (TypeError, ValueError, SyntaxError, RecursionError, MemoryError) as error:
        raise InputError(f"{place} is not a puzzle ({error}); wanted rows as in kk/3ppl/test.parquet") from error
    people = len(names)
    wanted = {
        "names": isinstance(row["names"], list) and all(isinstance(name, str) and name for name in names),
        "statements": isinstance(statements, tuple)
        and len(statements) == people
        and all(_is_statement(statement, people) for statement in statements),
        "solution": len(solution) == people and all(isinstance(knight, bool) for knight in solution),
        "quiz": isinstance(row["quiz"], str),
    }
    if wrong := next((name for name, holds in wanted.items() if not holds), None):
        raise InputError(f"{place}: {wrong} is {row[wrong]!r:.80}; wanted rows as in kk/3ppl/test.parquet")
    return Puzzle(names, statements, solution, row["quiz"])


def _is_statement(value: Any, people: int) -> bool:
    """Return whether this is a statement about these people that `solve` and the wording support."""
    if not isinstance(value, tuple) or not value:
        return False
    operator, *parts = value
    if operator in ("telling-truth", "lying"):
        return len(parts) == 1 and type(parts[0]) is int and 0 <= parts[0] < people
    if operator == "not":
        return len(parts) == 1 and _is_statement(parts[0], people) and len(parts[0]) == 2
    known = operator in ("and", "or", "->", "<=>")
    return known and len(parts) == 2 and all(_is_statement(part, people) for part in parts)


def prompt(puzzle: Puzzle) -> str:
    """Return the data set's full prompt with chat marks; it ends with the `<think>` that opens the response."""
    return _PROMPT.format(quiz=puzzle.quiz)


def reward(response: str, *, names: Sequence[str], solution: Sequence[bool]) -> float:
    """Return format reward plus answer reward, as in the paper's released code: 3, −0.5, −1 or −3.

    `response` is the continuation of the prompt; the prompt's `<think>` is prepended if missing. Format: +1 if each of
    the four tags occurs exactly once and in order, else −1. Answer: +2 if everybody is identified correctly, −1.5 if
    not, −2 if the answer cannot be parsed or the format is bad.

    >>> reward("She lies. </think><answer> Zoey is a knave </answer>", names=["Zoey"], solution=[False])
    3.0
    """
    if "<think>" not in response:
        response = "<think>" + response
    if not _well_formed(response):
        return -1.0 - 2.0
    answer = re.findall(r"<answer>(.*?)</answer>", response, re.DOTALL)[-1].strip()
    told = read_answer(answer, names)
    if told is None:
        return 1.0 - 2.0
    return 1.0 + (2.0 if told == tuple(solution) else -1.5)


def _well_formed(response: str) -> bool:
    positions = [response.find(tag) for tag in _TAGS]
    return all(response.count(tag) == 1 for tag in _TAGS) and positions == sorted(positions)


def read_answer(answer: str, names: Sequence[str]) -> tuple[bool, ...] | None:
    """Return whom the text calls a knight (True) or knave (False); None unless it names everybody and nothing else."""
    lowered = answer.lower()
    if lowered.count("knight") + lowered.count("knave") != len(names):
        return None
    found = [re.search(rf"\b{re.escape(name)}\s+is\s+a\s+(knight|knave)\b", answer, re.IGNORECASE) for name in names]
    return None if None in found else tuple(match[1].lower() == "knight" for match in found)


class _KnightsKnaves:
    """Both tasks: the same puzzles for the same seed and people, worded for large or for small policies."""

    def __init__(self, name: str, people: tuple[int, ...], compact: bool) -> None:
        self.name, self.people, self.compact = name, people, compact

    def questions(
        self, n: int | None, *, seed: int, people: Sequence[int] | None = None, files: Sequence[str | Path] = ()
    ) -> list[Question]:
        """Return `n` questions with a cycling number of `people`, or `n` rows of parquet `files` (None: all).

        Rows are drawn without repetition, only from those with one of these numbers of people if `people` is given.
        """
        rng = random.Random(seed)
        if files:
            puzzles = [puzzle for puzzle in read_puzzles(*files) if not people or len(puzzle.names) in people]
            return [self.question(puzzle) for puzzle in draw_rows(puzzles, n, rng, files)]
        levels = tuple(people or self.people)
        return [self.question(generate_puzzle(levels[i % len(levels)], rng)) for i in range(n)]

    def question(self, puzzle: Puzzle) -> Question:
        """Word the puzzle for this task. Raises InputError for more people than compact puzzles have names."""
        if self.compact and len(puzzle.names) > len(COMPACT_NAMES):
            raise InputError(f"a puzzle has {len(puzzle.names)} people; {self.name} has {len(COMPACT_NAMES)} names")
        names = COMPACT_NAMES[: len(puzzle.names)] if self.compact else puzzle.names
        text = compact_prompt(puzzle.statements) if self.compact else prompt(puzzle)
        return Question(text, {"names": names, "solution": puzzle.solution}, level=len(names))

    def reward(self, response: str, question: Question) -> float:
        """Return the module's `reward`."""
        return reward(response, names=question.answer["names"], solution=question.answer["solution"])

    def grade(self, response: str, question: Question) -> Grade:
        """Grade a response as correct if its reward is 3: everybody named rightly, in good format.

        format_ok: the four tags are in order, which all rewards but −3 include as +1; an answer in good format that
        cannot be parsed (−1) has it too.
        """
        earned = self.reward(response, question)
        return Grade(earned, correct=earned == 3.0, format_ok=earned > -3.0)


knights_knaves = _KnightsKnaves("knights-knaves", people=(3, 4, 5, 6, 7), compact=False)
knights_knaves_compact = _KnightsKnaves("knights-knaves-compact", people=(2, 3, 4, 5), compact=True)
