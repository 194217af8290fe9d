"""The written case analysis from which the embedded policy learned."""

import itertools
import random

import pytest

from analyses.recipes.case_analysis import judge, write_response
from gradscope.tasks.knights_knaves import draw_statements, reward, solve
from gradscope.tasks.knights_knaves_wording import COMPACT_NAMES


@pytest.mark.parametrize("people", range(2, 9))
def test_a_clean_trace_always_ends_in_the_solution(people):
    rng = random.Random(people)
    for _ in range(20):
        statements = draw_statements(people, rng)
        response = write_response(statements, COMPACT_NAMES, rng=rng, check=0.5, free=rng.random() < 0.5)
        assert reward(response, names=COMPACT_NAMES[:people], solution=solve(statements)[0]) == 3.0
        assert "again" not in response


def test_noise_makes_some_answers_wrong_and_leaves_all_well_formed():
    rng = random.Random(0)
    earned = []
    for _ in range(200):
        statements = draw_statements(3, rng)
        response = write_response(statements, COMPACT_NAMES, rng=rng, noise=0.2, check=0.3)
        earned.append(reward(response, names=COMPACT_NAMES[:3], solution=solve(statements)[0]))
    assert set(earned) == {3.0, -0.5}
    assert 0.4 < earned.count(3.0) / len(earned) < 0.8  # seen: .61


def test_a_verdict_is_what_every_completion_agrees_on():
    pair = ("or", ("telling-truth", 1), ("lying", 2))
    for speaker in (True, False):
        for status in itertools.product((True, False, None), repeat=2):
            verdict = judge(pair, 0, [speaker, *status])
            fits = [
                (one, two)
                for one, two in itertools.product((True, False), repeat=2)
                if status[0] in (None, one) and status[1] in (None, two) and (one or not two) == speaker
            ]
            assert (verdict.word == "no") == (not fits)
            for person in (1, 2):
                values = {fit[person - 1] for fit in fits}
                known = status[person - 1] is not None
                # Where every completion fits, the claim says nothing, and a person with one value is a known one.
                assert (person in verdict.forced) == (len(values) == 1 and not known)
                assert person not in verdict.forced or verdict.forced[person] in values
