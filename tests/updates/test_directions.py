"""Direction statistics against double loops: over tokens, over redrawn prompts one by one, and over pairs of tokens."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest
import torch
from support.refusals import refused
from torch import Tensor

from gradscope.objective import TokenStatistics
from gradscope.objective.logprobs import token_statistics
from gradscope.resampling import prompt_clusters
from gradscope.rollouts import TokenBatch
from gradscope.updates import (
    batch_direction_shares,
    right_direction_shares,
    similarity,
)
from gradscope.updates.directions import log_odds_change

EDGES = (0.0, 0.25, 0.5, 0.75, 1.0)
INF = math.inf
VALUES = ("delta_prob", "delta_logprob", "delta_log_odds")


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def make_table(num_groups: int = 8, seed: int = 0) -> pd.DataFrame:
    """Tokens of uneven prompts with movements of two updates; some tied, some advantages 0 or NaN, an odd index."""
    draw = rng(seed)
    group = np.repeat(np.arange(num_groups) * 3 + 1, draw.integers(8, 25, num_groups))
    size = len(group)
    shift = draw.normal(size=num_groups)[(group - 1) // 3]
    table = pd.DataFrame({"group": group, "interval": draw.integers(0, 4, size), "advantage": draw.normal(size=size)})
    for name in ("all", "only-0"):
        for value in VALUES:
            table[f"{value}.{name}"] = 0.4 * table["advantage"] + shift + draw.standard_normal(size)
        table.loc[draw.random(size) < 0.15, [f"{value}.{name}" for value in VALUES]] = 0.0
    table.loc[::11, "advantage"] = 0.0
    table.loc[::13, "advantage"] = np.nan
    table["net_weight"] = draw.normal(size=size)
    table.index = draw.permutation(size) + 1000
    return table


def share_by_loop(table: pd.DataFrame, chosen: Callable[[dict], bool], against: str, sign: int) -> tuple:
    """(tokens, ties, share) of update "all" among the rows that `chosen` takes."""
    tokens = ties = right = 0
    for row in table.to_dict("records"):
        if chosen(row) and row[against] * sign > 0:
            moved = row["delta_log_odds.all"]
            tokens += 1
            ties += moved == 0
            right += moved * sign > 0
    return tokens, ties, right / (tokens - ties) if tokens > ties else math.nan


def redrawn(table: pd.DataFrame, statistic: Callable[[pd.DataFrame], float], clusters: list, draws: np.ndarray) -> list:
    """The statistic of each resample, put together token by token from the drawn clusters."""
    parts = [table[which] for which in clusters]
    return [statistic(pd.concat([p for p, n in zip(parts, counts, strict=True) for _ in range(n)])) for counts in draws]


@pytest.mark.usefixtures("few_prompts_are_many")
@pytest.mark.parametrize("against", ["advantage", "net_weight"])
def test_shares_and_their_bounds_equal_loops_over_tokens_and_over_redrawn_prompts(against):
    table = make_table()
    found = right_direction_shares(table, against=against, seed=rng(4), resamples=30, confidence=0.8)
    assert list(found.columns) == ["interval", "sign", "num_tokens", "tied", "share", "lower", "upper"]
    draws = rng(4).multinomial(8, [1 / 8] * 8, size=30)
    clusters = [table["group"] == g for g in sorted(table["group"].unique())]
    for number, row in enumerate(found.itertuples()):
        sign = 1 if number % 2 == 0 else -1
        assert (row.interval, row.sign) == (number // 2, "positive" if sign == 1 else "negative")

        def by_loop(tokens: pd.DataFrame, row=row, sign=sign) -> tuple:
            return share_by_loop(tokens, lambda token: token["interval"] == row.interval, against, sign)

        assert (row.num_tokens, row.tied) == by_loop(table)[:2]
        assert row.share == pytest.approx(by_loop(table)[2], rel=1e-12)
        shares = redrawn(table, lambda tokens, by_loop=by_loop: by_loop(tokens)[2], clusters, draws)
        assert (row.lower, row.upper) == pytest.approx(tuple(np.nanquantile(shares, [0.1, 0.9])), rel=1e-10)
    assert found["tied"].sum() > 5


@pytest.mark.usefixtures("few_prompts_are_many")
def test_the_same_group_number_in_two_batches_is_two_prompts():
    one, other = make_table(3, seed=1), make_table(3, seed=2)
    table = pd.concat({10: one, 20: other}, names=["batch"]).reset_index("batch")
    draws = rng(0).multinomial(6, [1 / 6] * 6, size=25)
    clusters = [(table["batch"] == b) & (table["group"] == g) for b in (10, 20) for g in (1, 4, 7)]
    assert prompt_clusters(table).tolist() == [int(np.flatnonzero(c)[0]) for c in np.array(clusters).T]
    row = right_direction_shares(table, seed=rng(0), resamples=25).iloc[0]

    def share(tokens: pd.DataFrame) -> float:
        return share_by_loop(tokens, lambda token: token["interval"] == 0, "advantage", 1)[2]

    expected = np.nanquantile(redrawn(table, share, clusters, draws), [0.025, 0.975])
    assert (row.lower, row.upper) == pytest.approx(tuple(expected), rel=1e-10)


def test_where_no_token_moved_there_is_no_share_and_with_one_prompt_no_bound():
    table = make_table()
    still = right_direction_shares(table.assign(**{"delta_log_odds.all": 0.0}), seed=rng())
    assert (still["tied"] == still["num_tokens"]).all() and (still["tied"] > 0).all()
    assert still[["share", "lower", "upper"]].isna().all(axis=None)
    one = right_direction_shares(table.assign(group=1), seed=rng())
    assert one["share"].notna().all() and one[["lower", "upper"]].isna().all(axis=None)
    single = table[table["advantage"] > 0].iloc[:1].assign(**{"delta_log_odds.all": 0.5})
    assert right_direction_shares(single, seed=rng())["share"].fillna(-1).tolist() == [1.0, -1.0]


def without(*columns: str) -> pd.DataFrame:
    return make_table().drop(columns=list(columns))


@pytest.mark.parametrize(
    ("table", "settings"),
    [
        (make_table(), {"name": "lopti"}),
        (make_table(), {"by": "kind"}),
        (without("group"), {}),
        (without("net_weight"), {"against": "net_weight"}),
        (make_table().assign(advantage=np.nan), {}),
        (make_table().assign(kind="word"), {"against": "kind"}),
        (make_table().assign(**{"delta_log_odds.all": np.nan}), {}),
        (make_table().assign(sign="word"), {"by": "sign"}),
        (make_table(), {"values": [1, 1]}),
        (make_table().assign(group=np.nan), {}),
        (make_table().iloc[:0], {}),
        (make_table(), {"confidence": 95.0}),
    ],
)
def test_a_table_that_cannot_be_judged_is_refused(table, settings):
    with refused():
        right_direction_shares(table, seed=rng(), **settings)


@pytest.mark.usefixtures("few_prompts_are_many")
@pytest.mark.parametrize(("outside", "value"), [(0, "delta_log_odds"), ([1, 3], "delta_prob"), ([], "delta_log_odds")])
def test_similarity_is_pearsons_over_the_other_tokens_with_bounds_over_prompts(outside, value):
    table = make_table()
    updated = [outside] if isinstance(outside, int) else outside

    def pearson(tokens: pd.DataFrame) -> float:
        rest = tokens[[i not in updated for i in tokens["interval"]]]
        return float(np.corrcoef(rest[f"{value}.all"], rest[f"{value}.only-0"])[0, 1])

    settings = {"outside": outside, "value": value, "seed": rng(2), "resamples": 30, "confidence": 0.9}
    found = similarity(table, "all", "only-0", **settings)
    assert found.num_tokens == sum(i not in updated for i in table["interval"])
    assert found.correlation == pytest.approx(pearson(table), rel=1e-9)
    clusters = [table["group"] == g for g in sorted(table["group"].unique())]
    draws = rng(2).multinomial(8, [1 / 8] * 8, size=30)
    expected = np.quantile(redrawn(table, pearson, clusters, draws), [0.05, 0.95])
    assert (found.lower, found.upper) == pytest.approx(tuple(expected), rel=1e-8)


def test_similarity_of_an_update_that_moved_nothing_or_of_no_token_is_unknown():
    table = make_table()
    cases = [
        (table.assign(**{"delta_log_odds.all": 0.3}), 0),
        (table.assign(**{"delta_log_odds.only-0": 0.0}), 0),
        (table, [0, 1, 2, 3]),
        (table.iloc[:1], []),
    ]
    for tokens, outside in cases:
        found = similarity(tokens, "all", "only-0", outside=outside, seed=rng(), resamples=20)
        assert all(math.isnan(number) for number in (found.correlation, found.lower, found.upper))
    one = similarity(table.assign(group=5), "all", "all", outside=0, seed=rng())
    assert one.correlation == pytest.approx(1.0) and math.isnan(one.lower)
    tiny = table.assign(**{"delta_log_odds.all": 7 + 1e-9 * table["delta_log_odds.only-0"]})
    # 7 + 1e-9·x keeps seven digits of x.
    assert similarity(tiny, "all", "only-0", outside=0, seed=None).correlation == pytest.approx(1.0, abs=1e-6)
    with refused("delta_log_odds.lopti"):
        similarity(table, "all", "lopti", outside=0, seed=None)


def make_batch(advantages: Tensor, mask: Tensor | None = None) -> TokenBatch:
    """A batch of these advantages; column 0 is the prompt, and the ids do not matter."""
    shape = advantages.shape
    mask = torch.ones(shape, dtype=torch.bool) if mask is None else mask.clone()
    mask[:, 0] = False
    return TokenBatch(
        input_ids=torch.zeros(shape, dtype=torch.long),
        attention_mask=torch.ones(shape, dtype=torch.bool),
        response_mask=mask,
        response_start=torch.ones(len(advantages), dtype=torch.long),
        group_ids=torch.arange(len(advantages)),
        temperature=torch.ones(len(advantages)),
        advantages=advantages,
    )


def statistics_of(gaps: Tensor) -> TokenStatistics:
    """Of a token whose logit is that much above the only other one's: π = 1 / (1 + e^−gap)."""
    logits = torch.stack([gaps, torch.zeros_like(gaps)], dim=-1)
    return token_statistics(logits, torch.zeros(gaps.shape, dtype=torch.long))


def shares_by_loop(before: Tensor, after: Tensor, batch: TokenBatch) -> list[tuple[int, str, int, int, float]]:
    """(interval, sign, tokens, ties, share) from the logit gaps themselves, which no rounding of π touches."""
    rows = []
    for interval in range(4):
        for name, sign in (("positive", 1), ("negative", -1)):
            tokens = ties = right = 0
            for row in range(len(batch)):
                for column in range(1, before.shape[1]):
                    gap, new = before[row, column].item(), after[row, column].item()
                    probability = 1 / (1 + math.exp(-gap))
                    here = EDGES[interval] <= probability < EDGES[interval + 1] or (interval == 3 and probability == 1)
                    advantage = batch.advantages[row, column].item()
                    if here and batch.response_mask[row, column] and advantage * sign > 0:
                        tokens += 1
                        ties += new == gap
                        right += (new > gap) if sign == 1 else (new < gap)
            rows.append((interval, name, tokens, ties, right / (tokens - ties) if tokens > ties else math.nan))
    return rows


def as_rows(before: TokenStatistics, after: TokenStatistics, batch: TokenBatch) -> list[tuple]:
    table = batch_direction_shares(before, after, batch)
    assert table["label"].tolist() == [label for label in ("[0, ¼)", "[¼, ½)", "[½, ¾)", "[¾, 1]") for _ in range(2)]
    return list(table[["interval", "sign", "num_tokens", "tied", "share"]].itertuples(index=False, name=None))


def assert_same(found: list[tuple], expected: list[tuple]) -> None:
    assert [row[:4] for row in found] == [row[:4] for row in expected]
    assert [row[4] for row in found] == pytest.approx([row[4] for row in expected], nan_ok=True)


def test_shares_of_a_batch_equal_a_double_loop_with_ties_and_a_mask_with_holes():
    generator = torch.Generator().manual_seed(0)
    before = 2 * torch.randn(12, 20, generator=generator)
    after = before + 0.1 * torch.randn(12, 20, generator=generator)
    after[:, 5:8] = before[:, 5:8]
    advantages = torch.randn(12, 20, generator=generator)
    advantages[:, 3] = 0.0  # no direction is right
    advantages[:, 4] = math.nan  # unknown
    batch = make_batch(advantages, torch.rand(12, 20, generator=generator) < 0.8)
    expected = shares_by_loop(before, after, batch)
    assert sum(row[3] for row in expected) > 10
    assert min(row[2] for row in expected) > 3
    assert_same(as_rows(statistics_of(before), statistics_of(after), batch), expected)


def test_a_probability_that_is_exactly_one_or_zero_before_and_after_is_tied_and_becoming_so_is_a_movement():
    nothing, possible = torch.tensor([-INF]), torch.tensor([-1.0])

    def statistics(*columns: tuple[Tensor, Tensor]) -> TokenStatistics:
        logprob, complement = (torch.stack(values, dim=1) for values in zip(*columns, strict=True))
        return TokenStatistics(logprob, complement, torch.zeros_like(logprob))

    one, zero = (torch.zeros(1), nothing), (nothing, torch.zeros(1))
    half = (possible, torch.log1p(-possible.exp()))  # π = 0.37
    before, after = statistics(half, one, zero, half, half, zero), statistics(half, one, zero, one, zero, half)
    batch = make_batch(torch.ones(1, 6))
    assert log_odds_change(before, after).tolist()[0] == [0.0, 0.0, 0.0, INF, -INF, INF]
    found = {row[:2]: row[2:] for row in as_rows(before, after, batch)}
    assert found[3, "positive"][:2] == (1, 1)  # 1 stays 1
    assert found[0, "positive"] == (2, 1, 1.0)  # 0 stays 0, and 0 becomes possible
    assert found[1, "positive"] == (2, 0, 0.5)  # one becomes certain, one impossible
