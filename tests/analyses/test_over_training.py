"""Gradients of intervals along runs: one batch against autograd per token, what is measured again, and the figures."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations_with_replacement

import numpy as np
import pytest
import torch
from support.groups import CASTS, NARROW, brute_force, cosine
from support.policies import make_batch, make_policy
from support.steps import flat_state, warm_state

from analyses.common.batch_gradients import measure_batch
from gradscope.objective import resolve_advantages
from gradscope.policy import AdamWState

SEED = 3
CLIP = 0.01
"""Well below the norm of the batch's gradient, so that it is clipped."""


@pytest.fixture(scope="module")
def policy():
    return make_policy("qwen2", torch.float64)


@pytest.fixture(scope="module")
def batch(policy):
    """Three prompts, two responses each, at T = 0.7: every interval occurs."""
    batch = make_batch(policy, temperature=0.7)
    return replace(batch, advantages=resolve_advantages(batch))


@pytest.fixture(scope="module")
def brute(policy, batch):
    return brute_force(policy, batch, NARROW)


@pytest.fixture(scope="module")
def state(policy):
    return warm_state(policy)


@pytest.fixture(scope="module")
def tables(policy, batch, state):
    metric = AdamWState.from_state_dict(policy.model, state, max_grad_norm=CLIP)
    return measure_batch(policy, batch, NARROW, metric, generator=torch.Generator().manual_seed(SEED))


@pytest.fixture(scope="module", params=["raw", "adamw"])
def scaled(request, policy, brute, state):
    """The metric's name, and the weighted token gradients in it: [tokens, P]."""
    if request.param == "raw":
        return "raw", brute.gradients
    beta2, eps = state["param_groups"][0]["betas"][1], state["param_groups"][0]["eps"]
    gradient = brute.gradients.sum(0)
    clip = min(1.0, CLIP / gradient.norm().item())
    old, steps = flat_state(policy, state, "exp_avg_sq", 0.0), flat_state(policy, state, "step", 0.0)
    second = beta2 * old + (1 - beta2) * (clip * gradient) ** 2
    return "adamw", brute.gradients * clip / ((second / (1 - beta2 ** (steps + 1))).sqrt() + eps)


def pick(table, metric):
    return table[table["metric"] == metric]


def parts(brute, gradients):
    """g_{p,a}: [prompts, 4, P]."""
    out = torch.zeros(3, 4, gradients.shape[1], dtype=torch.float64)
    for gradient, a, p in zip(gradients, brute.interval, brute.prompt, strict=True):
        out[p, a] += gradient
    return out


def test_norms_and_shares_are_those_of_single_token_gradients_in_both_metrics(tables, brute, scaled):
    metric, gradients = scaled
    rows = pick(tables["gradients"], metric).set_index("interval")
    sums = parts(brute, gradients).sum(0)
    whole = sums.sum(0)
    for a in range(4):
        expected = {
            "gradient_norm": sums[a].norm(),
            "gradient_share": sums[a] @ whole / (whole @ whole),
            "norm_ratio": sums[a].norm() / whole.norm(),
            "cosine_with_all": cosine(sums[a], whole),
        }
        # Clipping divides by the norm + 1e-6, which cancels in shares: 1e-4 of CLIP in a norm.
        found = rows.loc[a, list(expected)].astype(float).tolist()
        assert found == pytest.approx([float(value) for value in expected.values()], rel=2e-4)
    assert rows.loc["all", "gradient_norm"] == pytest.approx(whole.norm().item(), rel=2e-4)
    assert rows.loc[list(range(4)), "gradient_share"].sum() == pytest.approx(1.0)


def test_cosines_and_signals_are_those_of_loops_over_prompts(tables, brute, scaled):
    metric, gradients = scaled
    rows = pick(tables["cosines"], metric).set_index(["interval", "other"])
    each = parts(brute, gradients)
    sums = each.sum(0)
    for a, b in combinations_with_replacement(range(4), 2):
        assert rows.loc[(a, b), "cosine"] == pytest.approx(cosine(sums[a], sums[b]), rel=1e-4, abs=1e-5)
        apart = sum(float(each[p, a] @ each[q, b]) for p in range(3) for q in range(3) if p != q)
        size = (sums[a].norm() * sums[b].norm()).item()
        assert rows.loc[(a, b), "signal_product"] == pytest.approx(1.5 * apart, rel=2e-4, abs=1e-5 * size)


def test_shares_of_squares_are_those_of_the_drawn_signs_the_same_in_both_metrics(tables, batch, brute, scaled):
    metric, gradients = scaled
    signs = 2.0 * torch.randint(2, batch.input_ids.shape, generator=torch.Generator().manual_seed(SEED)) - 1
    signed = parts(brute, gradients * signs[batch.response_mask][:, None])
    squares = signed.square().sum((0, 2))
    shares, counts = squares / squares.sum(), np.bincount(brute.interval)
    rows = pick(tables["gradients"], metric).query("interval != 'all'")
    assert rows["squared_share"].to_numpy() == pytest.approx(shares.numpy(), rel=100 * CASTS)
    index = np.log2(shares.numpy() / (counts / counts.sum()))
    assert rows["dominance_index"].to_numpy() == pytest.approx(index, abs=1e-4)


def test_tokens_are_counted_and_what_one_minus_pi_predicts_is_a_loops(tables, policy, batch, brute):
    counts, predicted, entropies = np.zeros(4), np.zeros(4), np.zeros(4)
    place = 0
    for row in range(len(batch)):
        ids, kept = batch.sequence(row)
        logits = policy.model(input_ids=ids[None], use_cache=False).logits[0]
        for t in kept.tolist():
            probs = torch.softmax(logits[t - 1].detach() / batch.temperature[row], -1)
            a = brute.interval[place]
            counts[a] += 1
            predicted[a] += (brute.weight[place] * (1 - probs[ids[t]].item())) ** 2
            entropies[a] -= (probs * probs.log()).sum().item()
            place += 1
    rows = tables["tokens"]
    assert rows["tokens"].tolist() == counts.tolist()
    assert rows["token_share"].to_numpy() == pytest.approx(counts / counts.sum())
    assert rows["predicted_share"].to_numpy() == pytest.approx(predicted / predicted.sum(), rel=100 * CASTS)
    assert rows["entropy"].to_numpy() == pytest.approx(entropies / counts, rel=100 * CASTS)
    [facts] = tables["batches"].to_dict("records")
    assert facts["entropy"] == pytest.approx(entropies.sum() / counts.sum(), rel=100 * CASTS)
    assert (facts["prompts"], facts["responses"], facts["tokens"]) == (3, 6, counts.sum())
