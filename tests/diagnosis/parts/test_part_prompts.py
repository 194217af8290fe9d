"""Prompts, told by their own vectors and rollouts."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from support.planted import make_gram, plant_vectors

from gradscope.diagnosis.parts.prompts import add_rollouts, carriers
from gradscope.diagnosis.sums import prompt_table
from gradscope.gradients import Gram
from gradscope.rollouts import Response, collate


def test_prompts_are_told_by_their_own_vectors():
    rng = np.random.default_rng(1)
    vectors = plant_vectors(7, [1, 0.2, 0.5, 0.1], [0.5, 1, 0.3, 0.2], rng)
    vectors[2] *= -1.5  # opposes the rest
    found, prompts, whole = prompt_table(Gram.exact(make_gram(vectors))), vectors.sum(1), vectors.sum((0, 1))
    assert found["gradient_share"].is_monotonic_decreasing and found["gradient_share"].sum() == pytest.approx(1)
    assert found["group"].iat[-1] == 2 and found["cosine_with_rest"].iat[-1] < 0 and not found["share_error"].any()
    for row in found.itertuples():
        own, rest = prompts[row.group], whole - prompts[row.group]
        assert row.gradient_norm == pytest.approx(np.linalg.norm(own))
        assert row.gradient_share == pytest.approx(own @ whole / (whole @ whole))
        expected = own @ rest / np.linalg.norm(own) / np.linalg.norm(rest)
        assert row.cosine_with_rest == pytest.approx(expected)
    shares = found["gradient_share"]
    assert shares[: carriers(shares)].sum() >= 0.5 > shares[: carriers(shares) - 1].sum()


def test_what_the_rollouts_tell_of_a_prompt():
    rows = [Response([1, 2], [3] * n, group=g, reward=r) for g, n, r in ((0, 2, 1.0), (0, 3, 0.0), (4, 2, 0.25))]
    batch = collate(rows)
    table = pd.DataFrame({"response": [0, 0, 1, 1, 1, 2, 2], "group": [0] * 5 + [4] * 2})
    table["position"] = [0, 1, 0, 1, 2, 0, 1]
    table["weight"], table["log_one_minus_prob"] = [1, -1, 1, -3, 1, 0, 2], np.log([0.5, 0.5, 0.5, 0.4, 0.9, 0.9, 0.1])
    found = add_rollouts(pd.DataFrame({"group": [4, 0]}), table, batch)
    assert found[["group", "responses", "tokens", "response", "position"]].to_numpy().tolist() == [
        [4, 1, 2, 2, 1],
        [0, 2, 5, 1, 1],
    ]
    assert found["reward"].tolist() == [0.25, 0.5]
