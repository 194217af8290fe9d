"""Intervals against comparisons one by one, and summaries with confidence bounds against loops over redrawn prompts."""

import math
from itertools import pairwise

import numpy as np
import pytest
from support.refusals import refused

from gradscope.intervals import EDGES, assign_intervals, interval_labels, interval_shares, summarize
from gradscope.resampling import Resampling

COLUMNS = ["interval", "label", "num_tokens", "num_measured", "value", "lower", "upper"]


def assign_by_loop(prob: float, edges) -> int:
    """The interval [lo, hi) that holds prob, the last one closed."""
    for index, (low, high) in enumerate(pairwise(edges)):
        if low <= prob < high or (prob == high == edges[-1]):
            return index
    raise AssertionError(prob)


def statistic_by_loop(values, intervals, statistic, interval) -> float:
    """One interval's statistic over the tokens that were measured."""
    chosen = [v for v, i in zip(values, intervals, strict=True) if i == interval and not math.isnan(v)]
    if statistic == "sum":
        return math.fsum(chosen)
    if not chosen:
        return math.nan
    return math.sqrt(np.mean(np.square(chosen))) if statistic == "rms" else float(np.mean(chosen))


def clustered_tokens(seed=0, num_clusters=12):
    """Tokens of uneven prompts whose values share a prompt effect; every seventh is unmeasured."""
    rng = np.random.default_rng(seed)
    clusters = np.repeat(np.arange(num_clusters), rng.integers(5, 30, num_clusters))
    values = rng.normal(size=num_clusters)[clusters] + rng.normal(size=len(clusters)) + 3
    values[::7] = np.nan
    return values, rng.integers(0, 4, len(clusters)), clusters


@pytest.mark.parametrize("edges", [EDGES, (0.0, 1.0), (0, 0.1, 0.9999999, 1), (0.2, 0.4, 0.6)])
def test_every_probability_falls_where_a_comparison_puts_it(edges):
    inside = np.linspace(edges[0], edges[-1], 500)
    ulps = [np.nextafter(edge, side) for edge in edges for side in (edges[0], edges[-1])]
    prob = np.concatenate([inside, np.array(edges, dtype=float), ulps])
    expected = [assign_by_loop(p, edges) for p in prob]
    assert assign_intervals(prob, edges).tolist() == expected


@pytest.mark.parametrize("bad", [math.nan, -0.01, 1.0000001])
def test_what_is_no_probability_is_refused(bad):
    with refused():
        assign_intervals([0.5, bad])


@pytest.mark.parametrize("edges", [[0.5], [0, 0.5, 0.5, 1], [1, 0], [0, math.nan, 1]])
def test_edges_that_do_not_increase_are_refused(edges):
    with refused():
        assign_intervals([0.5], edges)


@pytest.mark.parametrize("statistic", ["mean", "sum", "rms"])
def test_a_summary_equals_a_loop_over_tokens(statistic):
    values, intervals, clusters = clustered_tokens()
    table = summarize(values, intervals, clusters, statistic=statistic, resampling=Resampling(resamples=50))
    assert list(table.columns) == COLUMNS
    assert table.label.tolist() == interval_labels()
    for row in table.itertuples():
        assert row.num_tokens == (intervals == row.interval).sum()
        assert row.num_measured == ((intervals == row.interval) & ~np.isnan(values)).sum() < row.num_tokens
        assert row.value == pytest.approx(statistic_by_loop(values, intervals, statistic, row.interval), rel=1e-12)
        assert row.lower < row.value < row.upper


@pytest.mark.usefixtures("few_prompts_are_many")
@pytest.mark.parametrize("statistic", ["mean", "sum", "rms"])
def test_the_bounds_are_percentiles_over_redrawn_clusters_token_by_token(statistic):
    values, intervals, clusters = clustered_tokens()
    table = summarize(values, intervals, clusters, statistic=statistic, resampling=Resampling(5, 0.8, 40))
    draws = np.random.default_rng(5).multinomial(12, [1 / 12] * 12, size=40)  # how often each prompt is drawn
    for interval in range(4):
        redrawn = []
        for counts in draws:
            tokens = np.concatenate([np.flatnonzero(clusters == c) for c in range(12) for _ in range(counts[c])])
            redrawn.append(statistic_by_loop(values[tokens], intervals[tokens], statistic, interval))
        expected = np.quantile(redrawn, [0.1, 0.9])
        assert table.loc[interval, ["lower", "upper"]].tolist() == pytest.approx(expected, rel=1e-10)


def test_the_confidence_interval_covers_the_truth_about_as_often_as_it_says():
    # 300 experiments of 30 prompts with a strong prompt effect: binomial standard error .0126 at .95. The percentile
    # bootstrap is a little narrow at 30 clusters (about .93), one over single tokens would cover about a third.
    covered, rng = 0, np.random.default_rng(7)
    for _ in range(300):
        clusters = np.repeat(np.arange(30), 20)
        values = rng.normal(size=30)[clusters] + 0.5 * rng.normal(size=600)
        row = summarize(
            values, np.zeros(600, int), clusters, resampling=Resampling(rng, resamples=200), edges=(0, 1)
        ).iloc[0]
        covered += row.lower <= 0 <= row.upper
    assert 0.89 <= covered / 300 <= 0.98


def test_shares_equal_counts_and_add_up_to_one():
    _, intervals, clusters = clustered_tokens()
    table = interval_shares(intervals, clusters)
    assert list(table.columns) == COLUMNS
    assert table.value.tolist() == pytest.approx((np.bincount(intervals) / len(intervals)).tolist(), rel=1e-12)
    assert table.value.sum() == pytest.approx(1, rel=1e-12)
    assert ((table.lower < table.value) & (table.value < table.upper)).all()


def test_shares_of_a_quantity_skip_unmeasured_tokens():
    values, intervals, clusters = clustered_tokens()
    table = interval_shares(intervals, clusters, values=values**2, resampling=Resampling(resamples=20))
    whole = np.nansum(values**2)
    for row in table.itertuples():
        assert row.value == pytest.approx(np.nansum(values[intervals == row.interval] ** 2) / whole, rel=1e-12)
        assert row.num_measured < row.num_tokens


def test_an_interval_without_tokens_is_a_row_without_a_mean():
    table = summarize([1.0, 3.0], [0, 0], ["a", "b"], resampling=Resampling(resamples=100))
    assert table.num_tokens.tolist() == [2, 0, 0, 0]
    assert table.value.isna().tolist() == [False, True, True, True]
    assert table.loc[0, "value"] == 2.0
    shares = interval_shares([0, 0], ["a", "b"])
    assert shares.value.tolist() == [1.0, 0.0, 0.0, 0.0]


def test_one_cluster_has_values_but_no_bounds():
    redrawn = Resampling(np.random.default_rng(0))
    tables = [
        summarize([1.0, 2.0], [0, 1], [7, 7], resampling=redrawn),
        summarize([1.0, 2.0], [0, 1], [7, 7], resampling=redrawn, statistic="sum"),
        summarize([1.0, 2.0], [0, 1], [7, 8], resampling=redrawn),  # two clusters, but one in each interval
        interval_shares([0, 1], [7, 7], resampling=redrawn),
    ]
    for table in tables:
        assert table.value[:2].notna().all()
        assert table[["lower", "upper"]].isna().all(axis=None)


@pytest.mark.parametrize("statistic", ["mean", "rms"])
def test_bounds_of_a_mean_size_that_no_batch_could_contradict_are_left_out(statistic):
    # Six prompts with a token each: of one size, to 2 %; and one of them a thousand times the others.
    even, uneven = 10 + 0.2 * np.arange(6), np.array([0.1, 0.12, 0.09, 0.11, 0.1, 115.0])
    intervals, clusters = np.repeat([0, 3], 6), np.tile(np.arange(6), 2)
    table = summarize(np.concatenate([even, uneven]), intervals, clusters, statistic=statistic).set_index("interval")
    assert table["value"][3] > 10
    assert table["lower"][0] < table["value"][0] < table["upper"][0]
    assert np.isnan(table.loc[3, ["lower", "upper"]]).all()


def test_summaries_refuse_what_does_not_fit_together():
    cases = [
        (([1.0], [0, 1], [0, 0]), {}),
        (([1.0], [4], [0]), {}),
        (([1.0], [0], [0]), {"statistic": "median"}),
        (([1.0], [0], [0]), {"resampling": Resampling(confidence=95.0)}),
        (([1.0], [0], [0]), {"resampling": Resampling(resamples=0)}),
    ]
    for arguments, settings in cases:
        with refused():
            summarize(*arguments, **settings)
