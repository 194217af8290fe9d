"""The chain of thought in haste, and the tokenizer of the policy that learns it."""

import itertools
import random

import pytest

from analyses.recipes.case_analysis import holds
from analyses.recipes.hasty_analysis import Haste, judge, write_hastily
from gradscope.tasks.knights_knaves import draw_statements, reward, solve
from gradscope.tasks.knights_knaves_wording import COMPACT_NAMES

PATIENT = Haste(leap=0.0, more=1.0, steering=0.0)
"""Supposes something only where no claim is left to judge, and judges every claim."""


def earned(people: int, rng: random.Random, haste: Haste | None = None) -> float:
    statements = draw_statements(people, rng)
    response = write_hastily(statements, COMPACT_NAMES, rng=rng, haste=haste)
    return reward(response, names=COMPACT_NAMES[:people], solution=solve(statements)[0])


@pytest.mark.parametrize("people", range(2, 6))
def test_without_haste_every_answer_is_right(people):
    rng = random.Random(people)
    assert {earned(people, rng, PATIENT) for _ in range(60)} == {3.0}


def test_haste_makes_answers_wrong_and_leaves_all_well_formed():
    rng = random.Random(0)
    found = [earned(3, rng) for _ in range(400)]
    assert set(found) == {3.0, -0.5}
    assert 0.3 < found.count(3.0) / len(found) < 0.6  # seen: .45 of 375


def test_a_verdict_is_what_every_world_that_fits_agrees_on():
    claim = ("->", ("telling-truth", 1), ("lying", 2))
    for status in itertools.product((True, False, None), repeat=3):
        worlds = list(itertools.product((True, False), repeat=3))
        worlds = [w for w in worlds if all(s in (None, v) for s, v in zip(status, w, strict=True))]
        fits = [w for w in worlds if holds(claim, dict(enumerate(w))) == w[0]]
        forced = {p: fits[0][p] for p in range(3) if fits and status[p] is None and len({w[p] for w in fits}) == 1}
        verdict = judge(claim, 0, status)
        assert dict(verdict.forced) == forced
        assert (verdict.word == "no") == (not fits)
        assert (verdict.word == "ok") == (bool(fits) and fits == worlds and status[0] is not None)
