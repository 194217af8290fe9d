"""Right-direction shares against a double loop that knows which way each token's logit was moved."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from gradscope.batch import TokenBatch
from gradscope.errors import InputError
from gradscope.logprobs import TokenStatistics, token_statistics
from gradscope.updates import right_direction_shares

EDGES = (0.0, 0.25, 0.5, 0.75, 1.0)
INF = math.inf


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
    table = right_direction_shares(before, after, batch)
    assert table["label"].tolist() == [label for label in ("[0, ¼)", "[¼, ½)", "[½, ¾)", "[¾, 1]") for _ in range(2)]
    return list(table[["interval", "sign", "num_tokens", "tied", "share"]].itertuples(index=False, name=None))


def assert_same(found: list[tuple], expected: list[tuple]) -> None:
    assert [row[:4] for row in found] == [row[:4] for row in expected]
    assert [row[4] for row in found] == pytest.approx([row[4] for row in expected], nan_ok=True)


def test_shares_equal_a_double_loop_with_ties_and_a_mask_with_holes():
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


def test_tokens_whose_probability_rounds_to_one_still_have_a_direction():
    # float32 1/(1 + e^−gap) is 1.0 from 18 on, and log π is 0 from 104 on: there log(1−π) alone tells.
    before = torch.tensor([[0.0, 18.0, 40.0, 120.0, 300.0, 18.0, 120.0, 300.0]])
    after = torch.tensor([[0.0, 19.0, 39.5, 121.0, 299.0, 18.0, 120.0, 301.0]])
    advantages = torch.tensor([[0.0, 1.0, 1.0, 1.0, 1.0, 1.0, -1.0, -1.0]])
    assert (statistics_of(before).logprob.exp()[0, 1:] == 1).all()
    assert (statistics_of(before).logprob[0, [3, 4, 6, 7]] == 0).all()
    batch = make_batch(advantages)
    expected = shares_by_loop(before, after, batch)
    assert expected[6:] == [(3, "positive", 5, 1, 0.5), (3, "negative", 2, 1, 0.0)]
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
    found = {row[:2]: row[2:] for row in as_rows(before, after, batch)}
    assert found[3, "positive"][:2] == (1, 1)  # 1 stays 1
    assert found[0, "positive"] == (2, 1, 1.0)  # 0 stays 0, and 0 becomes possible
    assert found[1, "positive"] == (2, 0, 0.5)  # one becomes certain, one impossible


def test_a_logprob_rounded_above_zero_counts_as_certain():
    above = TokenStatistics(*(torch.full((1, 2), value) for value in (1e-7, -15.0, 0.0)))
    after = replace(above, log_one_minus_prob=torch.full((1, 2), -14.0))
    assert as_rows(above, after, make_batch(torch.tensor([[0.0, -1.0]])))[7] == (3, "negative", 1, 0, 1.0)


def test_other_edges_make_other_rows():
    gaps = torch.tensor([[0.0, -1.0, 1.0]])
    table = right_direction_shares(
        statistics_of(gaps), statistics_of(gaps + 1), make_batch(torch.ones(1, 3)), edges=(0.0, 0.5, 1.0)
    )
    assert table["num_tokens"].tolist() == [1, 0, 1, 0]
    np.testing.assert_array_equal(table["share"], [1.0, math.nan, 1.0, math.nan])


def test_a_batch_without_advantages_is_refused():
    batch = replace(make_batch(torch.ones(1, 3)), advantages=None)
    with pytest.raises(InputError, match="no advantages, so no direction is right"):
        right_direction_shares(statistics_of(torch.ones(1, 3)), statistics_of(torch.ones(1, 3)), batch)
