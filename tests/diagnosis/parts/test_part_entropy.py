"""Parts of the change of entropy, against sums over tokens."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from support.planted import LABELS, numbers

from gradscope.diagnosis.parts.entropy import entropy_rows
from gradscope.intervals import assign_intervals


def test_parts_of_the_change_of_entropy_are_sums_over_tokens_and_hold_what_was_planted():
    """Tokens of [¾, 1] with Â > 0 lower it by .02 nats in the mean of all prompts that there could be."""
    rng, inside, planted = np.random.default_rng(0), 0, -0.02
    for trial in range(100):
        prompts, each = 30, 8
        table = pd.DataFrame({"group": np.repeat(np.arange(prompts), each)})
        table["interval"], table["advantage"] = rng.integers(0, 4, len(table)), rng.choice([-1.0, 0.0, 1.0], len(table))
        table["prob"] = rng.uniform(0.01, 1, len(table))
        chosen = (table["interval"] == 3) & (table["advantage"] > 0)
        effect = 12 * planted * rng.normal(1, 0.5, prompts)[table["group"]]  # one token in twelve
        table["entropy_part"] = (np.where(chosen, effect, 0.0) + rng.normal(0, 0.01, len(table))) / len(table)
        whole = {"0": 0.25, "momentum": -1.0}
        rows, found = entropy_rows(table, whole, LABELS, seed=trial)
        own = found[(found["interval"] == LABELS[3]) & (found["sign"] == "positive")].iloc[0]
        inside += own["lower"] <= planted <= own["upper"]
    assert 88 <= inside <= 100  # 95 of 100, within three standard deviations
    for row in found.itertuples():
        sign = {"positive": 1, "negative": -1, "zero": 0}[row.sign]
        kept = table[(table["interval"] == LABELS.index(row.interval)) & (table["advantage"] == sign)]
        assert (row.num_tokens, row.change) == (len(kept), pytest.approx(kept["entropy_part"].sum()))
    assert found["change"].sum() == pytest.approx(table["entropy_part"].sum())
    assert numbers(rows, "entropy_change_predicted") == [-0.75]


def test_the_covariance_that_stands_for_a_tokens_part_is_ranked_with_it():
    rng = np.random.default_rng(0)
    table = pd.DataFrame({"group": np.arange(200) // 10, "prob": rng.uniform(0.01, 1, 200)})
    table["interval"], table["advantage"] = assign_intervals(table["prob"]), rng.choice([-1.0, 1.0], 200)
    logs = np.log(table["prob"])
    covariance = (logs - logs.mean()) * (table["advantage"] - table["advantage"].mean())
    for part, expected in ((-covariance, 1.0), (covariance**3, -1.0)):
        rows, _ = entropy_rows(table.assign(entropy_part=part), {"0": 0.0}, LABELS, seed=None)
        assert numbers(rows, "entropy_proxy_rank") == [pytest.approx(expected)]
