"""Dealt puzzles: all of two people are known, by going through every pair of claims."""

from __future__ import annotations

from collections import Counter
from itertools import permutations, product

from support.refusals import refused

from analyses.common.puzzles import TEST, is_for_test
from gradscope.tasks.knights_knaves import compact_prompt, solve


def claims(speaker: int) -> list[tuple]:
    """All that one of two people may say."""
    atoms = [("telling-truth", 0), ("telling-truth", 1), ("lying", 1 - speaker)]
    negated = [("not", atom) for atom in atoms if atom[1] != speaker]
    return atoms + negated + [(op, *two) for op in ("and", "or", "->", "<=>") for two in permutations(atoms, 2)]


def test_a_number_of_people_whose_puzzles_are_all_dealt_is_left_out_from_then_on():
    solvable = (pair for pair in product(claims(0), claims(1)) if len(solve(pair)) == 1)
    every = {compact_prompt(pair) for pair in solvable if is_for_test(pair)}
    asked = TEST.questions(500, seed=0, people=(2, 3, 4, 5))
    assert {question.prompt for question in asked if question.level == 2} == every
    assert Counter(question.level for question in asked) == {2: len(every), 3: 135, 4: 135, 5: 135}
    assert len({question.prompt for question in asked}) == 500
    few = TEST.questions(300, seed=0, people=(2, 3, 4, 5))
    assert few == asked[:300] and [question.level for question in few] == [2, 3, 4, 5] * 75


def test_more_puzzles_than_there_are_is_one_line():
    with refused("95"):
        TEST.questions(96, seed=0, people=(2,))
