"""Means over seeds, paired differences, Holm's correction: each beside the textbook's formula."""

import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from analyses.common.contrasts import compare, differences, holm, mean_interval, seeds_to_tell, smallest_told


def runs(**values):
    rows = [
        {"variant": name, "label": name, "seed": seed, "accuracy": value}
        for name, found in values.items()
        for seed, value in enumerate(found)
    ]
    return pd.DataFrame(rows)


def test_the_interval_of_a_mean_is_the_textbooks():
    values = [0.3, 0.5, 0.4, 0.9]
    half = stats.t.ppf(0.975, 3) * np.std(values, ddof=1) / math.sqrt(4)
    assert mean_interval(values) == pytest.approx((0.525, 0.525 - half, 0.525 + half))


def test_seeds_that_are_all_alike_have_no_spread_to_claim_anything_from():
    mean, lower, upper = mean_interval([0.1 + 0.2, 0.3, 0.3])
    assert mean == pytest.approx(0.3) and math.isnan(lower) and math.isnan(upper)
    table = runs(grpo=[0.1, 0.2, 0.3], lopti=[0.4, 0.5, 0.6], both=[0.1, 0.2, 0.4])
    found = compare(table, "accuracy", [("lopti", "grpo"), ("both", "grpo")])
    assert found["difference"].tolist() == pytest.approx([0.3, 0.1 / 3])
    assert found["p"].isna().tolist() == [True, False] and not found.loc[0, "differs"]
    assert found.loc[1, "p_holm"] == found.loc[1, "p"]


def test_differences_are_paired_by_seed_whatever_the_order_of_rows():
    table = runs(grpo=[0.1, 0.5, 0.9], lopti=[0.2, 0.7, 1.0]).sample(frac=1, random_state=0)
    found = compare(table, "accuracy", [("lopti", "grpo")]).loc[0]
    differences = np.array([0.1, 0.2, 0.1])
    half = stats.t.ppf(0.975, 2) * differences.std(ddof=1) / math.sqrt(3)
    assert found["difference"] == pytest.approx(differences.mean())
    assert (found["lower"], found["upper"]) == pytest.approx((differences.mean() - half, differences.mean() + half))
    t = differences.mean() / (differences.std(ddof=1) / math.sqrt(3))
    assert found["p"] == pytest.approx(2 * stats.t.sf(t, 2))


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


def test_holm_multiplies_the_smallest_p_by_the_number_of_claims_and_never_falls():
    p = [0.04, 0.01, 0.03]
    # By hand: .01·3 = .03; .03·2 = .06; .04·1 = .04, which may not fall below .06.
    found = holm(pd.DataFrame({"p": p}))
    assert found["p_holm"].tolist() == pytest.approx([0.06, 0.03, 0.06])
    assert found["differs"].tolist() == [False, True, False]


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


@pytest.mark.parametrize("seeds", [2, 4, 12])
def test_the_smallest_difference_told_is_told_as_often_as_it_says_or_is_unknown(seeds):
    row = {"seeds": seeds, "lower": -0.1, "upper": 0.3}
    sd = 0.2 * np.sqrt(seeds) / stats.t.ppf(0.975, seeds - 1)
    found, bar = smallest_told(row, claims=3), stats.t.ppf(1 - 0.025 / 3, seeds - 1)
    if seeds == 2:
        assert np.isnan(found)
    else:
        assert stats.nct.sf(bar, seeds - 1, found / sd * np.sqrt(seeds)) == pytest.approx(0.8, abs=0.002)
