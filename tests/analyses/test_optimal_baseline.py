"""What analyses/measure/optimal_baseline.py measures, and what analyses/paper/optimal_baseline.py says of it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
import torch
from support.gradients import token_gradients
from support.policies import make_policy, make_responses

from analyses.measure.optimal_baseline import (
    ENERGY,
    LENGTH,
    POWER,
    PROXY,
    SUM,
    TOKENWISE,
    WHOLE,
    tabulate,
    weigh_others,
)
from analyses.paper.optimal_baseline import compare_units, save_variance
from gradscope.gradients import LOGITS, measure
from gradscope.rollouts import collate

LENGTHS = (7, 2, 5, 4)
# Tolerances of 1e-6: RMSNorm works in float32 whatever the dtype, whose rounding is 6e-8.


@pytest.fixture(scope="module")
def one_prompt():
    """Four responses to one prompt, in float64: the policy, its batch, token gradients and the table made of them."""
    policy = make_policy("llama", torch.float64)
    settings = {"lengths": LENGTHS, "prompt_lengths": (5,) * 4, "holes": False}
    responses = [replace(each, group=0, prompt_ids=[7, 8, 9]) for each in make_responses(policy, **settings)]
    batch = collate(responses)
    tokens = measure(policy, batch, self_check=False)
    rows, sketch = tabulate(policy, batch, tokens)
    return batch, token_gradients(policy, batch).double().numpy(), tokens, rows, sketch


def test_norms_are_those_of_one_autograd_call_per_token(one_prompt):
    _, gradients, tokens, rows, _ = one_prompt
    for place, length in enumerate(LENGTHS):
        own = gradients[tokens["response"] == place]
        row = rows.iloc[place]
        assert row[LENGTH] == length == len(own)
        assert row[SUM] == pytest.approx((own.sum(0) ** 2).sum(), rel=1e-6)
        assert row[ENERGY] == pytest.approx((own**2).sum(), rel=1e-5)  # the token table is float32
        assert row[PROXY] == pytest.approx((tokens[LOGITS][tokens["response"] == place].astype(float) ** 2).sum())


def test_every_baseline_leaves_what_a_double_loop_leaves(one_prompt):
    batch, gradients, tokens, rows, _ = one_prompt
    rewards = batch.rewards.double().numpy()
    starts = np.cumsum((0, *LENGTHS))
    sums = np.stack([gradients[a:b].sum(0) for a, b in pairwise(starts)])
    sizes = {None: np.ones(4), LENGTH: np.array(LENGTHS, float)} | {k: rows[k].to_numpy() for k in (PROXY, ENERGY, SUM)}
    for name, column in WHOLE.items():
        for i in range(4):
            others = [j for j in range(4) if j != i]
            baseline = np.average(rewards[others], weights=sizes[column][others])
            wanted = (((rewards[i] - baseline) * sums[i]) ** 2).sum()
            assert rows[POWER + name][i] == pytest.approx(wanted, rel=1e-6), name
    for name, column in TOKENWISE.items():
        for i in range(4):
            whole = np.zeros_like(sums[0])
            for t in range(LENGTHS[i]):
                above = below = 0.0
                for j in range(4):
                    if j != i and LENGTHS[j] > t:
                        upto = tokens[column][starts[j] : starts[j] + t + 1].astype(float) if column else [1.0]
                        size = sum(value**2 for value in upto)
                        above, below = above + size * rewards[j], below + size
                whole += (rewards[i] - (above / below if below else 0.0)) * gradients[starts[i] + t]
            assert rows[POWER + name][i] == pytest.approx((whole**2).sum(), rel=1e-6), name


def test_signal_and_loss_gradient_are_those_of_the_whole_vectors(one_prompt):
    batch, gradients, tokens, rows, sketch = one_prompt
    rewards = batch.rewards.double().numpy()
    sums = np.stack([gradients[tokens["response"] == i].sum(0) for i in range(4)])
    parts = [(rewards[i] - np.delete(rewards, i).mean()) * sums[i] for i in range(4)]
    products = [parts[i] @ parts[j] for i in range(4) for j in range(4) if i != j]
    # A sketch errs by 1/√4096 of the norms' product, one standard deviation: six of it.
    slack = 6 / 64 * np.mean([np.linalg.norm(a) * np.linalg.norm(b) for a in parts for b in parts])
    assert rows["signal"].to_numpy() == pytest.approx(np.mean(products), abs=slack)
    advantages = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
    wanted = np.linalg.norm(advantages @ sums) ** 2
    assert (sketch**2).sum() == pytest.approx(wanted, rel=6 * np.sqrt(2) / 64)


def test_one_alone_has_no_baseline():
    assert weigh_others(np.array([3.0, 5.0, 9.0]), np.ones(3), np.array([0, 1, 1])).tolist() == [0.0, 9.0, 5.0]


@pytest.fixture
def responses() -> pd.DataFrame:
    rng = np.random.default_rng(1)
    count = 56
    frame = pd.DataFrame({"group": np.arange(count) // 8, "advantage": rng.normal(size=count)})
    frame["length"], frame["signal"] = rng.integers(3, 30, count), np.repeat(rng.normal(size=7), 8)
    names = [PROXY, SUM, *(POWER + name for name in (*WHOLE, *TOKENWISE))]
    return frame.assign(**{name: rng.lognormal(2, 1, count) for name in names}, loss_gradient_squared=90.0)


def test_nothing_is_said_of_baselines_from_fewer_than_six_prompts_with_unequal_rewards(responses):
    few = responses.copy()
    few.loc[few["group"] >= 5, [name for name in few if name.startswith(POWER)]] = 0.0
    assert save_variance(few).empty and "saved" in save_variance(few)


def test_units_are_those_of_verls_formula_and_of_the_losss_own(responses):
    found = compare_units(responses).set_index("loss")
    count, lengths = len(responses), responses["length"].sum()
    verls = np.mean([a**2 * w for a, w in zip(responses["advantage"], responses[PROXY], strict=True)])
    norms = np.mean([a**2 * s for a, s in zip(responses["advantage"], responses[SUM], strict=True)])
    for loss, divisor in {"token-mean": lengths, "seq-mean-token-sum": count}.items():
        signal = 90.0 / divisor**2
        row = found.loc[loss]
        assert row["signal"] == pytest.approx(signal)
        assert row["noise"] == pytest.approx((norms * (count / divisor) ** 2 - signal) / (count - 1))
        assert row["proxy3"] == pytest.approx(max(0.0, (verls - signal) / (count - 1)))
        assert row["factor"] == pytest.approx(row["proxy3"] / row["noise"])
