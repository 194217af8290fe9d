"""Means over seeds and paired differences: what makes no claim, and how many seeds tell one."""

import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from analyses.common.contrasts import compare, differences, mean_interval, seeds_to_tell, smallest_told


def runs(**values):
    rows = [
        {"variant": name, "label": name, "seed": seed, "accuracy": value}
        for name, found in values.items()
        for seed, value in enumerate(found)
    ]
    return pd.DataFrame(rows)


def test_seeds_that_are_all_alike_have_no_spread_to_claim_anything_from():
    mean, lower, upper = mean_interval([0.1 + 0.2, 0.3, 0.3])
    assert mean == pytest.approx(0.3) and math.isnan(lower) and math.isnan(upper)
    table = runs(grpo=[0.1, 0.2, 0.3], lopti=[0.4, 0.5, 0.6], both=[0.1, 0.2, 0.4])
    found = compare(table, "accuracy", [("lopti", "grpo"), ("both", "grpo")])
    assert found["difference"].tolist() == pytest.approx([0.3, 0.1 / 3])
    assert found["p"].isna().tolist() == [True, False] and not found.loc[0, "differs"]
    assert found.loc[1, "p_holm"] == found.loc[1, "p"]


def test_a_seed_that_one_of_both_lacks_is_left_out_of_their_pair():
    found = compare(runs(grpo=[0.1, 0.2, 0.3], both=[0.3, 0.3]), "accuracy", [("both", "grpo")]).loc[0]
    assert found["seeds"] == 2 and found["difference"] == pytest.approx(0.15)


def test_a_variant_without_runs_or_with_one_makes_no_claim_and_corrects_no_other():
    table = runs(grpo=[0.1, 0.2, 0.35], lopti=[0.4, 0.55, 0.6], both=[0.9])
    found = compare(table, "accuracy", [("lopti", "grpo"), ("both", "grpo"), ("reweight", "grpo")])
    assert found["seeds"].tolist() == [3, 1, 0]
    assert found["p_holm"].isna().tolist() == [False, True, True]
    assert found.loc[0, "p_holm"] == found.loc[0, "p"]
    assert found["differs"].tolist() == [bool(found.loc[0, "p"] < 0.05), False, False]


def test_what_rounding_leaves_of_equal_numbers_is_no_difference():
    ones = [0.98 + 0.96 + 1.0, 0.1 + 0.2 + 0.3, 0.7 + 0.2 + 0.1]
    others = [1.0 + 0.98 + 0.96, 0.3 + 0.2 + 0.1, 0.1 + 0.2 + 0.7]
    assert ones != others
    found = compare(runs(grpo=ones, lopti=others), "accuracy", [("lopti", "grpo")]).loc[0]
    assert found["difference"] == 0.0 and math.isnan(found["p"]) and not found["differs"]


@pytest.mark.parametrize("claims", [1, 2])
def test_so_many_seeds_tell_a_difference_four_times_in_five_and_one_fewer_does_not(claims):
    """Power by the noncentral t distribution: of a t with n − 1 degrees of freedom around √n · difference / spread."""
    draws = np.random.default_rng(0).normal(0.02, 0.05, 6)
    table = pd.DataFrame({"variant": ["a"] * 6 + ["b"] * 6, "seed": [*range(6)] * 2, "x": [*draws, *np.zeros(6)]})
    row = differences(table, "x", [("a", "b")]).iloc[0]
    needed = int(seeds_to_tell(0.03, row, claims=claims))

    def power(n):
        bar = stats.t.ppf(1 - 0.025 / claims, n - 1)
        shift = np.sqrt(n) * 0.03 / draws.std(ddof=1)
        return stats.nct.sf(bar, n - 1, shift) + stats.nct.cdf(-bar, n - 1, shift)

    assert power(needed) >= 0.8 > power(needed - 1)
    nothing = dict(row) | {"seeds": 1, "lower": np.nan, "upper": np.nan}
    assert np.isnan(seeds_to_tell(0.03, nothing)) and np.isnan(smallest_told(nothing))
