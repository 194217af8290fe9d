"""Advantages, masks, loss and weights against double loops in Python floats, and the gradient by float64 autograd."""

import itertools
import math
import statistics
from types import SimpleNamespace

import pytest
import torch
from support.losses import grpo_by_loop, reinforce_pp_by_loop, term_by_loop, weight_by_loop
from support.refusals import refused

from gradscope.objective import kl_k3, lopti_split, reinforce_pp_advantages, reweight
from gradscope.objective.equations import grpo_advantages, kl_k1, policy_loss, token_weight_parts, token_weights, whiten

CLIPS = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.24}


def clipped_batch():
    """A [8, 12] float64 batch whose ratios lie on every side of every clip, with holes in the mask."""
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(8, 12, dtype=torch.float64, generator=generator) * 3 - 3
    new = old + torch.randn(8, 12, dtype=torch.float64, generator=generator) * 0.4
    new[:, 3] = old[:, 3] + 2.7  # ratio 15, past the dual clip
    new[:, 4] = old[:, 4]  # ratio exactly 1
    ref = old + torch.randn(8, 12, dtype=torch.float64, generator=generator)
    advantages = torch.randn(8, 12, dtype=torch.float64, generator=generator)
    advantages[:, 5] = 0.0
    mask = torch.rand(8, 12, generator=generator) < 0.8
    return {"logprobs": new, "old_logprobs": old, "advantages": advantages, "response_mask": mask}, ref


def weights_by_autograd(batch, **settings):
    """−num_tokens · ∂loss/∂logprob by one backward pass of the loss."""
    leaf = batch["logprobs"].clone().requires_grad_()
    loss = policy_loss(**(batch | {"logprobs": leaf}), **settings)
    return -settings["num_tokens"] * torch.autograd.grad(loss, leaf)[0]


# ---- advantages


def test_grpo_advantages_equal_a_loop_over_groups_in_any_order():
    rewards, groups = [3.0, -1.5, 3.0, 0.1, 0.1, 0.1, 2.0, -3.0], [9, 2, 2, 5, 5, 5, 9, 2]
    advantages = grpo_advantages(torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups))
    assert advantages.tolist() == pytest.approx(grpo_by_loop(rewards, groups), rel=1e-12)


def test_a_group_of_one_and_a_group_of_equal_rewards_get_exactly_zero():
    # Three times 0.1 in float64 has a mean that is not 0.1; rounding over eps would not be 0.
    rewards = torch.tensor([0.1, 0.1, 0.1, 5.0, 1.0, 0.0], dtype=torch.float64)
    advantages = grpo_advantages(rewards, torch.tensor([0, 0, 0, 1, 2, 2]))
    assert advantages[:4].tolist() == [0.0] * 4
    assert advantages[4].item() > 0.7


def test_reinforce_pp_advantages_equal_a_double_loop_and_credit_passes_over_holes():
    generator = torch.Generator().manual_seed(2)
    rewards = torch.randn(3, dtype=torch.float64, generator=generator)
    old, ref = (-torch.rand(3, 6, dtype=torch.float64, generator=generator) for _ in range(2))
    mask = torch.tensor([[0, 1, 1, 1, 1, 1], [0, 1, 0, 0, 1, 1], [1, 0, 1, 0, 0, 0]]).bool()
    advantages = reinforce_pp_advantages(rewards, old, ref, mask, kl_coef=0.3)
    expected = reinforce_pp_by_loop(rewards.tolist(), old.tolist(), ref.tolist(), mask.tolist(), 0.3)
    assert advantages[mask].tolist() == pytest.approx(list(expected.values()), rel=1e-10)
    assert (advantages[~mask] == 0).all()


def test_reinforce_pp_ignores_whatever_stands_at_masked_tokens_and_ref_when_off():
    rewards, mask = torch.tensor([1.0, -1.0]), torch.tensor([[True, False, True], [True, True, False]])
    old, ref = torch.full((2, 3), -1.0), torch.full((2, 3), -2.0)
    clean = reinforce_pp_advantages(rewards, old, ref, mask, kl_coef=0.1)
    dirty = reinforce_pp_advantages(rewards, old.masked_fill(~mask, math.nan), ref, mask, kl_coef=0.1)
    assert torch.equal(clean, dirty)
    off = reinforce_pp_advantages(rewards, old, torch.full((2, 3), math.nan), mask, kl_coef=0.0)
    assert off[mask].tolist() == pytest.approx([0.866025, 0.866025, -0.866025, -0.866025], abs=1e-6)  # 1/√(4/3)


def test_whitened_values_have_mean_zero_and_unbiased_variance_one_over_kept_tokens():
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(5, 7, dtype=torch.float64, generator=generator)
    mask = torch.rand(5, 7, generator=generator) < 0.6
    kept = whiten(values, mask)[mask].tolist()
    assert statistics.mean(kept) == pytest.approx(0, abs=1e-14)
    assert statistics.variance(kept) == pytest.approx(1, rel=1e-7)  # the 1e-8 under the root


def test_whitening_one_token_equal_tokens_or_none_gives_exactly_zero():
    values = torch.tensor([[0.1, 0.1, 0.1, 7.0]], dtype=torch.float64)
    for kept in ([0, 0, 0, 1], [1, 1, 1, 0], [0, 0, 0, 0]):
        assert torch.equal(whiten(values, torch.tensor([kept]).bool()), torch.zeros_like(values))


def test_nan_and_infinite_rewards_are_refused():
    groups, mask = torch.tensor([0, 0]), torch.ones(2, 1, dtype=torch.bool)
    for bad in (math.nan, math.inf):
        rewards = torch.tensor([1.0, bad])
        with refused("rewards"):
            grpo_advantages(rewards, groups)
        with refused("rewards"):
            reinforce_pp_advantages(rewards, torch.zeros(2, 1), torch.zeros(2, 1), mask, kl_coef=0.0)
    with refused("old_logprobs", "ref_logprobs"):
        nowhere = torch.full((2, 1), math.nan)
        reinforce_pp_advantages(torch.tensor([1.0, 2.0]), torch.zeros(2, 1), nowhere, mask, kl_coef=0.1)


# ---- Reweight and Lopti


@pytest.mark.parametrize("shape", [(3,), (3, 4)])
def test_reweight_scales_every_advantage_by_equation_4(shape):
    generator = torch.Generator().manual_seed(4)
    advantages = torch.randn(shape, dtype=torch.float64, generator=generator)
    old = -torch.rand(3, 4, dtype=torch.float64, generator=generator)
    scaled = reweight(advantages, old, alpha=0.3)
    for i, t in itertools.product(range(3), range(4)):
        advantage = advantages[i].item() if len(shape) == 1 else advantages[i, t].item()
        assert scaled[i, t].item() == pytest.approx((0.3 * math.exp(old[i, t]) + 0.7) * advantage, rel=1e-12)


def test_lopti_splits_the_kept_tokens_in_two_with_the_edge_itself_high():
    old = torch.tensor([[0.1, 0.25, 0.3, 0.9], [0.2, 0.25, 0.24, 1.0]]).log()
    old[0, 1] = old[1, 1] = math.log(0.25)
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]]).bool()
    edge = old[0, 1].exp().item()  # the very number the split compares
    low, high = lopti_split(old, mask, eta=edge)
    assert low.tolist() == [[True, False, False, False], [False, False, True, False]]
    assert torch.equal(low | high, mask)
    assert not (low & high).any()


def test_settings_outside_the_unit_interval_and_unknown_probabilities_are_refused():
    old, mask = torch.tensor([[math.nan, -1.0]]), torch.tensor([[True, True]])
    for bad in (-0.1, 1.1, math.nan):
        with refused("alpha"):
            reweight(torch.ones(1), old, alpha=bad)
        with refused():
            lopti_split(old, mask, eta=bad)
    with refused("old_logprobs"):
        lopti_split(old, mask, eta=0.5)


# ---- loss and weights


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_weight_of_each_estimator_of_kl_is_its_slope_and_the_corrected_one_the_slope_times_the_ratio(
    corrected, estimator
):
    batch, ref = clipped_batch()
    batch["advantages"] = torch.zeros_like(batch["advantages"])
    settings = CLIPS | {"kl_coef": 0.05, "ref_logprobs": ref, "num_tokens": 61, "kl_corrected": corrected}
    settings["kl_estimator"] = estimator
    keep, new = batch["response_mask"], batch["logprobs"]
    ratio, log_ratio = (new - batch["old_logprobs"]).exp(), ref - new
    values = {"k1": -log_ratio, "k2": log_ratio**2 / 2, "k3": log_ratio.exp() - log_ratio - 1}
    slopes = {"k1": torch.ones_like(new), "k2": -log_ratio, "k3": 1 - log_ratio.exp()}
    value, slope = values[estimator], slopes[estimator]
    terms = value * (ratio if corrected else 1)
    expected = torch.where(keep, -0.05 * (ratio * (value + slope) if corrected else slope), 0.0)
    assert policy_loss(**batch, **settings).item() == pytest.approx(0.05 * terms[keep].sum().item() / 61, rel=1e-12)
    assert torch.allclose(token_weights(**batch, **settings), expected, rtol=1e-12, atol=1e-15)
    assert torch.allclose(weights_by_autograd(batch, **settings), expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("dual", [None, 10.0])
@pytest.mark.parametrize("kl_coef", [0.0, 0.05])
def test_loss_and_weights_equal_a_double_loop_and_autograd_with_every_clip_active(dual, kl_coef):
    batch, ref = clipped_batch()
    settings = CLIPS | {"clip_ratio_c": dual, "kl_coef": kl_coef, "ref_logprobs": ref, "num_tokens": 61}
    total, expected = 0.0, torch.zeros(8, 12, dtype=torch.float64)
    for i, t in itertools.product(range(8), range(12)):
        if batch["response_mask"][i, t]:
            token = [x[i, t].item() for x in (batch["logprobs"], batch["old_logprobs"], ref, batch["advantages"])]
            total += term_by_loop(*token, SimpleNamespace(**settings))
            expected[i, t], _ = weight_by_loop(*token, SimpleNamespace(**settings))
    assert policy_loss(**batch, **settings).item() == pytest.approx(-total / 61, rel=1e-12)
    assert torch.allclose(token_weights(**batch, **settings), expected, rtol=1e-12, atol=1e-15)
    assert torch.allclose(weights_by_autograd(batch, **settings), expected, rtol=1e-12, atol=1e-15)


def test_the_weights_equal_autograd_with_reweight_and_each_mask_of_lopti():
    batch, ref = clipped_batch()
    batch["advantages"] = reweight(batch["advantages"], batch["old_logprobs"], alpha=0.3)
    settings = CLIPS | {"clip_ratio_c": 10.0, "kl_coef": 0.05, "ref_logprobs": ref, "num_tokens": 61}
    whole = token_weights(**batch, **settings)
    masks = lopti_split(batch["old_logprobs"], batch["response_mask"], eta=0.01)
    parts, losses = [], []
    for mask in masks:
        assert mask.any()
        part = batch | {"response_mask": mask}
        parts.append(token_weights(**part, **settings))
        losses.append(policy_loss(**part, **settings).item())
        assert torch.allclose(parts[-1], weights_by_autograd(part, **settings), rtol=1e-12, atol=1e-15)
        assert (parts[-1][~mask] == 0).all()
    assert torch.equal(parts[0] + parts[1], whole)
    assert sum(losses) == pytest.approx(policy_loss(**batch, **settings).item(), rel=1e-12)


@pytest.mark.parametrize(("ratio", "advantage"), [(1.25, 1.0), (0.75, -1.0), (8.0, -1.0), (1.25, -1.0), (0.75, 1.0)])
def test_exactly_at_a_clips_edge_a_token_is_not_clipped(ratio, advantage):
    # Ratios whose log ratio is exact in one direction: old is chosen so that exp(new − old) is the edge itself.
    new = torch.tensor([[math.log(ratio)]], dtype=torch.float64)
    edge = new.exp().item()
    settings = {
        "clip_ratio_low": 1 - edge if edge < 1 else 0.25,
        "clip_ratio_high": edge - 1 if 1 < edge < 2 else 0.25,
        "clip_ratio_c": edge if edge > 2 else 8.0,
        "num_tokens": 1,
    }
    batch = {
        "logprobs": new,
        "old_logprobs": torch.zeros_like(new),
        "advantages": torch.tensor([advantage], dtype=torch.float64),
        "response_mask": torch.ones(1, 1, dtype=torch.bool),
    }
    parts = token_weight_parts(**batch, **settings)
    assert not parts.clipped.item()
    assert parts.policy.item() == pytest.approx(edge * advantage, rel=1e-15)
    assert weights_by_autograd(batch, **settings).item() == pytest.approx(edge * advantage, rel=1e-15)


def test_microbatches_add_up_to_the_whole_batch():
    batch, ref = clipped_batch()
    settings = CLIPS | {"clip_ratio_c": 10.0, "kl_coef": 0.05, "num_tokens": int(batch["response_mask"].sum())}
    whole = policy_loss(**batch, **settings, ref_logprobs=ref).item()
    pieces = [slice(0, 1), slice(1, 5), slice(5, 8)]
    parts = [policy_loss(**{k: v[i] for k, v in batch.items()}, **settings, ref_logprobs=ref[i]).item() for i in pieces]
    assert math.fsum(parts) == pytest.approx(whole, rel=1e-12)


def test_one_advantage_per_response_equals_the_same_advantage_at_every_token():
    batch, _ = clipped_batch()
    settings = CLIPS | {"num_tokens": 61}
    per_response = batch | {"advantages": batch["advantages"][:, 0]}
    per_token = batch | {"advantages": batch["advantages"][:, :1].expand(8, 12)}
    assert torch.equal(token_weights(**per_response, **settings), token_weights(**per_token, **settings))
    assert torch.equal(policy_loss(**per_response, **settings), policy_loss(**per_token, **settings))


def test_whatever_stands_at_masked_tokens_reaches_neither_loss_nor_gradient():
    batch, ref = clipped_batch()
    settings = CLIPS | {"clip_ratio_c": 10.0, "kl_coef": 0.05, "num_tokens": 61}
    dropped = ~batch["response_mask"]
    for junk in (math.nan, math.inf, -math.inf):
        dirty = {k: v if k == "response_mask" else v.masked_fill(dropped, junk) for k, v in batch.items()}
        dirty_ref = ref.masked_fill(dropped, junk)
        assert torch.equal(
            policy_loss(**dirty, **settings, ref_logprobs=dirty_ref), policy_loss(**batch, **settings, ref_logprobs=ref)
        )
        assert torch.equal(
            weights_by_autograd(dirty, **settings, ref_logprobs=dirty_ref),
            weights_by_autograd(batch, **settings, ref_logprobs=ref),
        )


def test_a_clipped_ratio_that_overflows_leaves_loss_and_gradient_finite():
    batch = {
        "logprobs": torch.tensor([[-1.0, -1.0]]),
        "old_logprobs": torch.tensor([[-200.0, -200.0]]),  # the ratio is e^199, infinite in float32
        "advantages": torch.tensor([[1.0, -1.0]]),
        "response_mask": torch.ones(1, 2, dtype=torch.bool),
    }
    settings = CLIPS | {"clip_ratio_c": 10.0, "num_tokens": 2}
    assert policy_loss(**batch, **settings).item() == pytest.approx(-(1.24 - 10.0) / 2)
    assert weights_by_autograd(batch, **settings).tolist() == [[0.0, 0.0]]
    assert token_weights(**batch, **settings).tolist() == [[0.0, 0.0]]


def test_no_gradient_flows_into_old_or_reference_logprobs_or_advantages():
    batch, ref = clipped_batch()
    leaves = {k: v.clone().requires_grad_() for k, v in batch.items() if k != "response_mask"} | {"ref": ref}
    ref = leaves.pop("ref").clone().requires_grad_()
    loss = policy_loss(
        **leaves, response_mask=batch["response_mask"], **CLIPS, ref_logprobs=ref, kl_coef=0.1, num_tokens=61
    )
    loss.backward()
    assert leaves["logprobs"].grad is not None
    assert leaves["old_logprobs"].grad is leaves["advantages"].grad is ref.grad is None


def test_the_kl_estimates_equal_their_formulas_and_k3_keeps_its_digits_near_zero():
    logprobs, ref = torch.tensor([-1.0, -2.0, -1.0]), torch.tensor([-2.0, -0.5, -1.0 + 1e-4])
    assert torch.equal(kl_k1(logprobs, ref), logprobs - ref)
    for estimate, difference in zip(kl_k3(logprobs, ref).tolist(), (ref - logprobs).tolist(), strict=True):
        # d²/2 + d³/6 + d⁴/24 where d is small: exp(d) − d − 1 would cancel there, in this test too.
        exact = math.expm1(difference) - difference if abs(difference) > 0.1 else difference**2 / 2 + difference**3 / 6
        assert estimate == pytest.approx(exact, rel=2e-3)  # float32 expm1(d) − d at d = 1e-4 keeps ε/d
    assert (kl_k3(logprobs, ref) >= 0).all()


def test_settings_that_mean_nothing_are_refused_by_loss_and_weights():
    batch, _ = clipped_batch()
    good = CLIPS | {"num_tokens": 61}
    cases = [
        {"num_tokens": 0},
        {"clip_ratio_low": -0.1},
        {"clip_ratio_high": -0.1},
        {"clip_ratio_c": 1.0},
        {"kl_coef": 0.1},
        {"kl_coef": 0.1, "ref_logprobs": torch.full((8, 12), math.nan, dtype=torch.float64)},
    ]
    for function, change in itertools.product((policy_loss, token_weights), cases):
        with refused([*change][-1]):
            function(**batch, **(good | change))


@pytest.mark.parametrize("name", ["logprobs", "old_logprobs", "advantages"])
def test_a_nan_at_a_kept_token_is_refused_by_name(name):
    batch, _ = clipped_batch()
    batch["response_mask"][2, 2] = True
    batch[name] = batch[name].clone()
    batch[name][2, 2] = math.nan
    for function in (policy_loss, token_weights):
        with refused(name):
            function(**batch, **CLIPS, num_tokens=61)
