"""Net weights against a double loop over pairs of tokens."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from support.refusals import refused

from analyses.common.net_weights import net_weights
from gradscope.rollouts import Response, TokenBatch, collate
from gradscope.updates import right_direction_shares


def net_by_loop(table: pd.DataFrame, batch: TokenBatch) -> list[float]:
    """Σ weight over all tokens whose real ids up to and with their own, and whose temperature, are the same."""

    def key(row: dict) -> tuple:
        response = row["response"]
        column = int(batch.response_start[response]) + row["position"]
        ids = [int(batch.input_ids[response, s]) for s in range(column + 1) if batch.attention_mask[response, s]]
        return float(batch.temperature[response]), tuple(ids)

    rows = table.to_dict("records")
    return [math.fsum(other["weight"] for other in rows if key(other) == key(row)) for row in rows]


def tokens_of(batch: TokenBatch, seed: int = 0) -> pd.DataFrame:
    """Response, position, id and a random weight of the kept tokens, shuffled."""
    rows = [
        {
            "response": response,
            "position": column - int(batch.response_start[response]),
            "token_id": int(batch.input_ids[response, column]),
        }
        for response, column in batch.response_mask.nonzero().tolist()
    ]
    table = pd.DataFrame(rows)
    table["weight"] = np.random.default_rng(seed).normal(size=len(table))
    return table.sample(frac=1, random_state=seed)


def many_responses(seed: int = 0) -> list[Response]:
    """Short responses over three ids, so that many contexts meet; holes, prompts of several lengths, temperatures."""
    draw = np.random.default_rng(seed)
    prompts = [[0], [0, 1], [1], [0]]  # the first token of a response to [0] may make the context [0, 1]
    responses = []
    for number in range(40):
        ids = draw.integers(0, 3, draw.integers(1, 6)).tolist()
        mask = (draw.random(len(ids)) < 0.8).tolist()
        temperature = 0.7 if number % 4 == 3 else 1.0
        responses.append(Response(prompts[number % 4], ids, number % 4, temperature, response_mask=mask))
    return responses


@pytest.mark.parametrize("side", ["left", "right"])
def test_net_weights_sum_every_occurrence_of_the_same_context_and_token(side):
    batch = collate(many_responses(), side=side, pad_id=1)
    table = tokens_of(batch)
    found = net_weights(table, batch)
    assert found.index.equals(table.index)
    assert found.tolist() == pytest.approx(net_by_loop(table, batch), abs=1e-12)
    assert (np.abs(found - table["weight"]) > 1e-3).mean() > 0.4  # pairs that occur more than once


def test_a_pair_in_a_good_and_a_bad_response_is_half_wrong_by_advantages_and_right_by_its_net_weight():
    # Both responses begin with 7: it rises, as the good one asks and the net weight 2 − 1 does.
    batch = collate([Response([5], [7, 8]), Response([5], [7, 9])])
    table = pd.DataFrame({"response": [0, 0, 1, 1], "position": [0, 1, 0, 1], "token_id": [7, 8, 7, 9]})
    table = table.assign(group=0, interval=0, advantage=[2.0, 2.0, -1.0, -1.0], weight=[2.0, 2.0, -1.0, -1.0])
    table["delta_log_odds.all"] = [0.3, 0.1, 0.3, -0.2]
    table["net_weight"] = net_weights(table, batch)
    assert table["net_weight"].tolist() == [1.0, 2.0, 1.0, -1.0]
    assert right_direction_shares(table, seed=None)["share"].tolist() == [1.0, 0.5]
    net = right_direction_shares(table, against="net_weight", seed=None)
    assert (net["share"].tolist(), net["num_tokens"].tolist()) == ([1.0, 1.0], [3, 1])


def test_a_token_that_the_whole_group_shares_has_no_net_weight_though_rounding_leaves_one():
    rewards = np.array([1, 1, 1, 0, 0, 0, 0, 0], dtype=np.float32)
    advantages = (rewards - rewards.mean()) / rewards.std(ddof=1)
    batch = collate([Response([5], [7, 10 + i]) for i in range(8)])
    table = pd.DataFrame({"response": np.repeat(range(8), 2), "position": [0, 1] * 8})
    table["token_id"] = [i for r in range(8) for i in (7, 10 + r)]
    table["weight"] = np.repeat(advantages, 2)
    assert math.fsum(advantages.tolist()) != 0
    found = net_weights(table, batch).to_numpy().reshape(8, 2)
    assert found[:, 0].tolist() == [0.0] * 8
    np.testing.assert_array_equal(found[:, 1], advantages.astype(float))


def test_a_table_of_other_tokens_has_no_net_weights():
    batch = collate([Response([5], [7, 8], response_mask=[True, True]), Response([5], [7, 9, 9])])
    table = tokens_of(batch).sort_index()
    others = [
        table.iloc[:-1],
        pd.concat([table.iloc[:-1], table.iloc[:1]]),
        table.assign(token_id=7),
        table.assign(response=table["response"] + 1),
        table.assign(response=table["response"] - 2),
        table.assign(position=table["position"] - 1),
        table.assign(position=table["position"] + 100),
    ]
    for other in others:
        with refused():
            net_weights(other, batch)
