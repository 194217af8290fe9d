"""Estimated norms: unbiased, with the errors that they claim, and of each token's own gradient."""

from __future__ import annotations

from dataclasses import replace
from math import pi, sqrt

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import kstest
from support.policies import make_batch, make_policy, pad_both_sides
from torch import Tensor

from gradscope.errors import InputError
from gradscope.gradients import SUMS, MeasureSettings, TableMeasurement, interval_norms, join_responses, measure
from gradscope.gradients.estimates import (
    chi_factor,
    relative_norm_error,
    signed_square_norms,
    squared_changes,
)
from gradscope.policy import Policy
from gradscope.rollouts import TokenBatch

# torch itself calls torch.jit.script the first time that forward mode is used.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")

ESTIMATES = ["param_grad_norm", "param_grad_norm_se", *(f"{name}{tail}" for name in SUMS for tail in ("", "_se"))]
TEMPERATURES = (1.0, 0.7, 1.3, 0.9, 0.7, 2.0)


@pytest.fixture(scope="module")
def policy() -> Policy:
    """Its embedding is its head."""
    return make_policy("qwen2", sharpness=5.0)


@pytest.fixture(scope="module")
def batch(policy) -> TokenBatch:
    batch = make_batch(policy)
    return replace(batch, temperature=torch.tensor(TEMPERATURES))


@pytest.fixture(scope="module")
def exact(policy, batch) -> pd.DataFrame:
    return measure(policy, batch)


def estimate(policy: Policy, batch: TokenBatch, **settings: object) -> pd.DataFrame:
    return measure(policy, batch, norms="estimate", **({"self_check": False} | settings))


def own_gradients(policy: Policy, response: TokenBatch) -> Tensor:
    """∇ log π of each kept token, by one autograd call each, in float64: [m, P]."""
    ids, kept = response.sequence(0)
    logits = policy.model(input_ids=ids[None], use_cache=False).logits[0].double() / response.temperature[0]
    parameters, rows = list(policy.model.parameters()), []
    for t in kept.tolist():
        logprob = torch.log_softmax(logits[t - 1], -1)[ids[t]]
        found = torch.autograd.grad(logprob, parameters, retain_graph=True, allow_unused=True)
        pairs = zip(parameters, found, strict=True)
        rows.append(torch.cat([torch.zeros_like(p).flatten() if g is None else g.flatten() for p, g in pairs]))
    return torch.stack(rows).double()


def gram(policy: Policy, response: TokenBatch) -> Tensor:
    rows = own_gradients(policy, response)
    return rows @ rows.T


# The estimators.


def test_the_chi_factor_has_its_closed_forms():
    assert [chi_factor(p) for p in (1, 2, 3)] == pytest.approx([sqrt(2 / pi), sqrt(pi / 4), sqrt(8 / (3 * pi))])
    # E χ_p / √p = 1 − 1/(4p) + 1/(32p²) + …
    assert chi_factor(10_000) == pytest.approx(1 - 1 / 40_000, rel=1e-8)
    assert relative_norm_error(10_000) == pytest.approx(1 / sqrt(20_000), rel=1e-4)


@pytest.mark.parametrize("name", ["qwen2", "llama", "gpt2", "gemma2", "mixtral", "opt"])
def test_one_sample_is_what_the_token_gradients_give(name):
    policy = make_policy(name, torch.float64)
    response = make_batch(policy, temperature=0.7, side="left").select([2])
    rows = own_gradients(policy, response)
    scales = torch.randn(2, len(rows), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = signed_square_norms(policy.model, response, scales, 3, torch.Generator().manual_seed(7))
    generator = torch.Generator().manual_seed(7)
    signs = torch.stack([2.0 * torch.randint(2, (len(rows),), generator=generator) - 1 for _ in range(3)])
    expected = torch.stack([((s * scales) @ rows).square().sum(1) for s in signs.double()])
    # transformers' float32 casts inside float64 models.
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    changes = squared_changes(policy.model, response, 2, torch.Generator().manual_seed(7))
    generator = torch.Generator().manual_seed(7)
    for found in changes:
        direction = torch.randn(rows.shape[1], generator=generator, dtype=torch.float64)
        expected = (rows @ direction).square()
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-8 * expected.max().item())


@pytest.fixture(scope="module")
def draws(policy, batch) -> tuple[Tensor, Tensor]:
    """(⟨g_t, v⟩² of one response's tokens for 240 draws, the inner products of its gradients)."""
    response = batch.select([2])
    return squared_changes(policy.model, response, 240, torch.Generator().manual_seed(0)), gram(policy, response)


def test_sums_of_random_signs_are_unbiased_and_have_the_stated_variance(policy, batch):
    response, samples = batch.select([2]), 400
    inner, generator = gram(policy, response), torch.Generator().manual_seed(0)
    everything = torch.ones(1, len(inner), dtype=torch.float64)
    found = signed_square_norms(policy.model, response, everything, samples, generator)[:, 0]
    variance = 2 * (inner.square().sum() - inner.diagonal().square().sum())
    assert abs(found.mean() - inner.trace()) < 4 * (variance / samples).sqrt()
    # A sample variance has the relative standard error √((kurtosis − 1) / n); the kurtosis here is at most 15.
    assert abs(found.var() / variance - 1) < 4 * sqrt(14 / samples)


def test_sums_of_draws_are_unbiased_and_have_the_stated_variance(draws):
    squares, inner = draws
    found, variance = squares.sum(1), 2 * inner.square().sum()
    assert abs(found.mean() - inner.trace()) < 4 * (variance / len(found)).sqrt()
    scales = torch.linalg.eigvalsh(inner).square()
    kurtosis = 3 + 12 * scales.square().sum() / scales.sum() ** 2
    assert abs(found.var() / variance - 1) < 4 * ((kurtosis - 1) / len(found)).sqrt() < 0.9


def test_the_square_of_every_token_follows_the_chi_square_law(draws):
    squares, inner = draws
    for token, square in enumerate(inner.diagonal()):
        # The smallest of about ten p-values is below 1e-3 in one run of a hundred.
        assert kstest((squares[:, token] / square).numpy(), "chi2", args=(1,)).pvalue > 1e-3
    relative = squares.view(60, 4, -1).mean(1).sqrt() / chi_factor(4) / inner.diagonal().sqrt()
    # 60 estimates of four draws each: the mean is within 4 standard errors of 1, the deviation within 4 of its own.
    assert (relative.mean(0) - 1).abs().max() < 4 * relative_norm_error(4) / sqrt(60)
    assert (relative.std(0) / relative_norm_error(4) - 1).abs().max() < 4 / sqrt(2 * 59)


# In the token table.


def test_a_table_of_estimates_has_the_exact_tables_columns_and_those_of_the_estimates(policy, batch, exact):
    table = estimate(policy, batch, passes=2, draws=2)
    place = list(exact.columns).index("param_grad_norm")
    assert list(table.columns) == [*exact.columns[:place], *ESTIMATES]
    assert {str(table[name].dtype) for name in ESTIMATES} == {"float32"}
    layers = [name for name in exact.columns if name.startswith("act_grad_norm.")]
    assert table[layers].isna().all(axis=None) and table[ESTIMATES].notna().all(axis=None)
    same = [name for name in exact.columns[:place] if name not in layers]
    pd.testing.assert_frame_equal(table[same], exact[same], check_exact=False, rtol=1e-5, atol=1e-6)


def test_the_mean_over_seeds_tends_to_the_exact_norms_at_every_temperature(policy, batch, exact):
    draws, seeds = 8, 4
    tables = [estimate(policy, batch, draws=draws, seed=seed) for seed in range(seeds)]
    ratios = np.stack([t["param_grad_norm"] / exact["param_grad_norm"] for t in tables])
    # 4.5 standard errors for each of three dozen tokens; the error in the table is that share of its own estimate.
    assert np.abs(ratios.mean(0) - 1).max() < 4.5 * relative_norm_error(draws) / sqrt(seeds)
    for table in tables:
        share = table["param_grad_norm_se"] / table["param_grad_norm"]
        np.testing.assert_allclose(share, relative_norm_error(draws), rtol=1e-5)


@pytest.mark.parametrize("name", ["qwen2", "gpt2", "qwen3_moe"])
def test_an_intervals_only_token_is_exact_under_random_signs(name):
    policy = make_policy(name, sharpness=5.0)
    batch = replace(make_batch(policy), temperature=torch.tensor(TEMPERATURES))
    truth, table = measure(policy, batch), estimate(policy, batch, passes=2)
    assert table["param_grad_norm"].isna().all()
    alone = ~table.duplicated(["response", "interval"], keep=False)
    assert alone.sum() > 2
    squares = truth["param_grad_norm"].astype("float64") ** 2
    np.testing.assert_allclose(table["interval_square_sum"][alone], squares[alone], rtol=1e-4)
    weighted = truth["weight"].astype("float64") ** 2 * squares
    np.testing.assert_allclose(table["interval_weighted_square_sum"][alone], weighted[alone], rtol=1e-4)
    # Both signs give the same norm but for the order of sums.
    assert (table["interval_square_sum_se"][alone] <= 1e-5 * table["interval_square_sum"][alone]).all()


@pytest.mark.parametrize("settings", [{"passes": 48}, {"draws": 24}], ids=["signs", "draws"])
def test_interval_norms_lie_within_their_errors_of_the_exact_ones(policy, batch, exact, settings):
    found = interval_norms(estimate(policy, batch, **settings))
    for a, row in found.iterrows():
        mine = exact[exact["interval"] == a]
        squares = mine["param_grad_norm"].astype("float64") ** 2
        weighted = (mine["weight"].astype("float64") ** 2 * squares).sum()
        assert row["num_tokens"] == len(mine) > 0
        # 4 errors of its own, and rounding where a sum has one token and no error.
        for name, truth in (("mean_square", squares.mean()), ("weighted_square_sum", weighted)):
            assert abs(row[name] - truth) < 4 * row[f"{name}_se"] + 1e-4 * truth
        assert abs(row["rms_norm"] - sqrt(squares.mean())) < 4 * row["rms_norm_se"] + 1e-4 * row["rms_norm"]
    total = (exact["weight"].astype("float64") * exact["param_grad_norm"]) ** 2
    shares = total.groupby(exact["interval"]).sum() / total.sum()
    assert (np.abs(found["squared_share"] - shares) < 4 * found["squared_share_se"]).all()
    assert found["squared_share"].sum() == pytest.approx(1)


def test_the_same_seed_gives_the_same_numbers_and_another_seed_others(policy, batch):
    settings = {"passes": 2, "draws": 2}
    first = estimate(policy, batch, **settings)
    pd.testing.assert_frame_equal(estimate(policy, batch, **settings, self_check=True), first)
    other = estimate(policy, batch, **settings, seed=1)
    assert (other["param_grad_norm"] != first["param_grad_norm"]).all()


def test_padding_and_the_order_of_the_responses_change_nothing(policy, batch):
    settings = {"passes": 2, "draws": 2}
    table = estimate(policy, batch, **settings)
    pd.testing.assert_frame_equal(estimate(policy, pad_both_sides(batch, 3, 2), **settings), table)
    wanted = MeasureSettings(norms="estimate", self_check=False, **settings)
    with TableMeasurement(policy, batch, wanted) as measurement:
        frames = {}
        for group in reversed(measurement.groups):
            frames |= zip(group, measurement.measure_responses(group), strict=True)
    pd.testing.assert_frame_equal(join_responses([frames[row] for row in range(len(batch))]), table)


def test_interval_norms_are_those_of_a_loop():
    rng = np.random.default_rng(0)
    table = pd.DataFrame(
        {"response": [0, 0, 0, 1, 1, 2], "interval": [0, 0, 2, 0, 3, 3]} | {name: 0.0 for name in ESTIMATES[2:]}
    )
    for (_response, _interval), rows in table.groupby(["response", "interval"]):
        for name in ESTIMATES[2:]:
            table.loc[rows.index, name] = rng.random()
    found = interval_norms(table)
    totals = {}
    for a in range(4):
        seen, sums, errors = set(), [0.0, 0.0], [0.0, 0.0]
        for line in table[table["interval"] == a].to_dict("records"):
            if line["response"] not in seen:
                for k, name in enumerate(SUMS):
                    sums[k] += line[name]
                    errors[k] += line[f"{name}_se"] ** 2
            seen.add(line["response"])
        totals[a] = (sums, [sqrt(e) for e in errors])
    everything = sum(totals[a][0][1] for a in totals)
    for a, row in found.iterrows():
        count = int((table["interval"] == a).sum())
        if not count:
            assert row[["mean_square", "rms_norm_se", "weighted_square_sum", "squared_share"]].isna().all()
            continue
        (square, weighted), (square_se, weighted_se) = totals[a]
        assert row["mean_square"] == pytest.approx(square / count)
        assert row["mean_square_se"] == pytest.approx(square_se / count)
        assert row["rms_norm"] == pytest.approx(sqrt(square / count))
        assert row["rms_norm_se"] == pytest.approx(square_se / count / (2 * sqrt(square / count)))
        assert (row["weighted_square_sum"], row["weighted_square_sum_se"]) == pytest.approx((weighted, weighted_se))
        share, rest = weighted / everything, sum(totals[b][1][1] for b in totals if b != a)
        assert row["squared_share"] == pytest.approx(share)
        assert row["squared_share_se"] == pytest.approx(((1 - share) * weighted_se + share * rest) / everything)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_callers_mode_and_a_policy_in_training_do_not_matter(batch, mode):
    # In float64: an estimate is a sum that cancels, and the error of two that are nearly equal cancels again.
    expected = estimate(make_policy("llama", torch.float64), batch, passes=2, draws=2)
    used = make_policy("llama", torch.float64, attention="sdpa")
    used.model.train()
    for p in list(used.model.parameters())[::3]:
        p.requires_grad_(False)
    used.model.lm_head.weight.grad = torch.ones_like(used.model.lm_head.weight)
    before = [(p.requires_grad, p.grad is None, p.detach().clone()) for p in used.model.parameters()]
    state = torch.get_rng_state()
    with mode():
        table = estimate(used, batch, passes=2, draws=2)
    pd.testing.assert_frame_equal(table, expected)
    assert used.model.training and used.model.config._attn_implementation == "sdpa"
    assert torch.equal(torch.get_rng_state(), state)
    for p, (flag, none, value) in zip(used.model.parameters(), before, strict=True):
        assert p.requires_grad == flag and (p.grad is None) == none and torch.equal(p, value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"norms": "estimate", "passes": 0}, "passes is 0; give 1 to"),
        ({"norms": "estimate", "draws": -3}, "draws is -3; give 1 to"),
        ({"passes": 4}, "passes is 4, but norms are exact"),
        ({"draws": 4}, "draws is 4, but norms are exact"),
        ({"norms": "estimate", "tokens_per_interval": 3}, "tokens_per_interval is given and norms are estimates"),
        ({"norms": "estimate", "per_module": True}, "per_module is given and norms are estimates"),
        ({"norms": "estimate", "tokens": torch.tensor([0])}, "tokens are given and norms are estimates"),
    ],
)
def test_settings_that_make_no_sense_are_refused(policy, batch, settings, words):
    with pytest.raises(InputError) as caught:
        measure(policy, batch, **settings)
    assert words in str(caught.value) and "\n" not in str(caught.value)
