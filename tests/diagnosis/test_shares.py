"""Shares of squared norms on planted tables: against loops written beside them, and against what was planted."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from support.planted import LABELS, PROMPTS, numbers, plant_table, sample_some

from gradscope.diagnosis import token_shares
from gradscope.diagnosis.rows import pick_row
from gradscope.diagnosis.shares import sum_by_prompt
from gradscope.diagnosis.terms import add_estimated_norms, add_weighted_norms, scaled_squares


def loop_shares(table: pd.DataFrame) -> dict[str, list[float]]:
    """Token by token; an interval that was measured in part is the ratio estimate by (w·‖e − π‖)²."""
    tokens, squares, predicted = ([0.0] * 4 for _ in range(3))
    for a in range(4):
        own, known, proxies = table[table["interval"] == a], [], []
        for row in own.itertuples():
            tokens[a] += 1
            predicted[a] += (row.weight * (1 - row.prob)) ** 2
            if not math.isnan(row.param_grad_norm):
                known.append((row.weight * row.param_grad_norm) ** 2)
                proxies.append((row.weight * row.logit_grad_norm) ** 2)
        whole = sum((row.weight * row.logit_grad_norm) ** 2 for row in own.itertuples())
        squares[a] = whole * sum(known) / sum(proxies)
    shares = [[part / sum(of) for part in of] for of in (tokens, squares, predicted)]
    return {
        "token_share": shares[0],
        "squared_share": shares[1],
        "predicted_share": shares[2],
        "dominance_index": [math.log2(s / t) for s, t in zip(shares[1], shares[0], strict=True)],
        "predicted_index": [math.log2(s / t) for s, t in zip(shares[2], shares[0], strict=True)],
        "added_index": [math.log2(s / p) for s, p in zip(shares[1], shares[2], strict=True)],
    }


@pytest.mark.parametrize("count", [None, 15])
def test_shares_and_indices_are_those_of_a_loop_over_tokens_also_where_a_sample_was_measured(count):
    table = plant_table() if count is None else sample_some(plant_table(), count)
    rows = token_shares(sum_by_prompt(table, 4), LABELS, seed=None)
    for statistic, expected in loop_shares(table).items():
        assert numbers(rows, statistic) == pytest.approx(expected, rel=1e-12)
    measured = [int(table["param_grad_norm"][table["interval"] == a].notna().sum()) for a in range(4)]
    assert numbers(rows, "squared_share", "n") == measured
    assert rows["lower"].isna().all()


@pytest.mark.usefixtures("few_prompts_are_many")
def test_bounds_are_percentiles_over_tables_whose_prompts_are_redrawn():
    table, resamples = plant_table(), 50
    rows = token_shares(sum_by_prompt(table, 4), LABELS, seed=np.random.default_rng(3), resamples=resamples)
    draws = np.random.default_rng(3).multinomial(PROMPTS, np.full(PROMPTS, 1 / PROMPTS), size=resamples)
    redrawn = [
        pd.concat([table[table["group"] == p] for p in range(PROMPTS) for _ in range(times[p])]) for times in draws
    ]
    found = [loop_shares(one) for one in redrawn]
    for statistic in ("token_share", "squared_share", "dominance_index", "added_index"):
        low, high = np.quantile([one[statistic] for one in found], [0.025, 0.975], axis=0)
        assert numbers(rows, statistic, "lower") == pytest.approx(low.tolist(), rel=1e-9)
        assert numbers(rows, statistic, "upper") == pytest.approx(high.tolist(), rel=1e-9)


@pytest.mark.all
def test_intervals_cover_the_planted_index_about_as_often_as_they_say():
    # The truth is the same statistic of a table so large that its own error is a tenth of theirs.
    rows = token_shares(sum_by_prompt(plant_table(99, prompts=2000), 4), LABELS, seed=None)
    truth = {name: numbers(rows, name)[0] for name in ("dominance_index", "added_index", "squared_share")}
    inside = dict.fromkeys(truth, 0)
    for seed in range(150):
        table = sample_some(plant_table(seed, prompts=16), 60, seed)
        rows = token_shares(sum_by_prompt(table, 4), LABELS, seed=np.random.default_rng(seed), resamples=300)
        for name, value in truth.items():
            inside[name] += numbers(rows, name, "lower")[0] <= value <= numbers(rows, name, "upper")[0]
    # Percentiles over 16 prompts fall short of .95; a coverage of .93 gives below 127 of 150 once in 10,000.
    assert all(127 <= count <= 150 for count in inside.values()), inside


def test_a_planted_boost_is_what_the_network_adds():
    """All gains equal but for those of low tokens: share and index follow from the boost by algebra."""
    table = plant_table()
    table["param_grad_norm"] = (1 - table["prob"]) * np.where(table["interval"] == 0, 3.0, 1.0)
    rows = token_shares(sum_by_prompt(table, 4), LABELS, seed=np.random.default_rng(0))
    share = numbers(rows, "predicted_share")[0]
    expected = math.log2(9 / (9 * share + 1 - share))
    assert numbers(rows, "added_index")[0] == pytest.approx(expected, rel=1e-12)
    table["param_grad_norm"] = 7 * (1 - table["prob"])
    rows = token_shares(sum_by_prompt(table, 4), LABELS, seed=np.random.default_rng(0))
    assert np.abs(numbers(rows, "added_index")).max() < 1e-12
    assert np.max(numbers(rows, "added_index", "lower")) < 0 < np.min(numbers(rows, "added_index", "upper"))


def test_scaled_squares_add_up_to_the_whole_sum_on_average():
    table = plant_table()
    whole = ((table["weight"] * table["param_grad_norm"]) ** 2).sum()
    sums = np.array([np.nansum(scaled_squares(sample_some(table, 20, seed))) for seed in range(200)])
    # Four standard errors of the 200 draws.
    assert abs(sums.mean() - whole) < 4 * sums.std() / math.sqrt(200)
    assert np.nansum(scaled_squares(table)) == pytest.approx(whole)


def test_all_of_one_interval_is_the_largest_share_in_every_redraw():
    table = plant_table()
    table["weight"] = np.where(table["interval"] == 0, table["weight"], 0.0)
    rows = token_shares(sum_by_prompt(table, 4), LABELS)
    assert [pick_row(rows, "largest_share", "raw", label)["value"] for label in LABELS] == [1.0, 0.0, 0.0, 0.0]


def test_norms_that_were_not_measured_are_estimated_by_the_cheap_ones_of_their_interval():
    table = add_weighted_norms(sample_some(plant_table(), 20))
    found = add_estimated_norms(table)
    known = table["weighted_norm"].notna()
    assert found.loc[known, "weighted_norm_estimate"].tolist() == table.loc[known, "weighted_norm"].tolist()
    for a in range(4):
        own = table["interval"] == a
        measured, cheap = table[own & known], (table["weight"] * table["logit_grad_norm"]).abs()
        ratio = measured["weighted_norm"].sum() / cheap[measured.index].sum()
        assert found.loc[own & ~known, "weighted_norm_estimate"].tolist() == pytest.approx(
            (ratio * cheap[own & ~known]).tolist()
        )
    whole = add_weighted_norms(plant_table())
    assert add_estimated_norms(whole) is whole


def test_an_index_says_no_more_than_its_share():
    # Prompts differ so much in the norms of their improbable tokens that the share of these is hardly known.
    found = []
    for seed in range(40):
        table, factors = plant_table(seed, prompts=8), np.exp(np.random.default_rng(seed).normal(size=8))
        table["param_grad_norm"] *= np.where(table["interval"] == 0, factors[table["group"]], 1.0)
        rows = token_shares(sum_by_prompt(table, 4), LABELS, seed=np.random.default_rng(seed)).set_index("statistic")
        own = rows[rows["interval"] == LABELS[0]]
        share, tokens, index = (own.loc[name] for name in ("squared_share", "token_share", "dominance_index"))
        assert index["value"] == pytest.approx(math.log2(share["value"] / tokens["value"]))
        assert index["upper"] <= -math.log2(tokens["lower"])
        found.append((index["lower"] > 0, share["lower"] > tokens["value"]))
    said, held = np.array(found).T
    assert not (said & ~held).any() and 0 < said.mean() < 1


def test_sums_from_measured_tokens_without_weight_are_unknown():
    table = plant_table()
    low = table["interval"] == 0
    table.loc[low & (table["group"] == 0), "weight"] = 0.0
    table.loc[low & (table["group"] != 0), "param_grad_norm"] = np.nan
    rows = token_shares(sum_by_prompt(table, 4), LABELS, seed=None)
    assert np.isnan(numbers(rows, "squared_share")).all() and not np.isnan(numbers(rows, "predicted_share")).any()
