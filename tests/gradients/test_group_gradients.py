"""Summed gradients of intervals, against one autograd call per token in float64 and loops over their sums."""

import copy
import math
from dataclasses import replace

import pandas as pd
import pytest
import torch
from support.groups import CASTS, EDGES, NARROW, Brute, brute_force, cosine
from support.policies import make_batch, make_policy, pad_both_sides
from support.refusals import refused
from support.tiers import every
from torch import Tensor

from gradscope.gradients import Resources, interval_gradients
from gradscope.objective import LossSettings
from gradscope.policy import AdamWState, Policy, adamw as adamw_state, flat_slices
from gradscope.rollouts import TokenBatch

NUMBERS = ["norm", "share", "cosine_with_all", "half_cosine", "signal", "noise", "signal_to_noise"]


def assert_matches(table: pd.DataFrame, cosines: pd.DataFrame, vectors: Tensor, rel: float) -> None:
    """Norms, shares and cosines of the vectors [A + 1, P]: each interval's G_a, and G last."""
    for a in range(5):
        if table["num_tokens"][a] == 0:
            assert table.loc[a, NUMBERS].isna().all()
            continue
        assert table["norm"][a] == pytest.approx(vectors[a].norm().item(), rel=rel)
        assert table["share"][a] == pytest.approx(
            (vectors[a] @ vectors[4] / vectors[4].square().sum()).item(), rel, rel
        )
        assert table["cosine_with_all"][a] == pytest.approx(cosine(vectors[a], vectors[4]), rel, rel)
    for a in range(4):
        for b in range(4):
            expected = cosine(vectors[a], vectors[b])  # NaN for no tokens, as it shall be
            assert cosines.loc[a, b] == pytest.approx(expected, rel, rel, nan_ok=True)


@pytest.fixture(scope="module")
def policy() -> Policy:
    return make_policy("qwen2", torch.float64)


@pytest.fixture(scope="module")
def batch(policy) -> TokenBatch:
    """Three prompts, two responses each, with holes and a single-token response, at T = 0.7: every interval occurs."""
    return make_batch(policy, temperature=0.7)


@pytest.fixture(scope="module")
def brute(policy, batch) -> Brute:
    return brute_force(policy, batch, NARROW)


def test_norms_shares_and_cosines_are_those_of_single_token_gradients_with_clipping_and_kl(policy, batch, brute):
    assert 0 < brute.clipped < len(brute.weight)
    result = interval_gradients(policy, batch, loss=NARROW)
    assert result.table["num_tokens"].tolist() == [*(brute.interval.count(a) for a in range(4)), batch.num_tokens]
    assert min(result.table["num_tokens"]) > 0
    assert_matches(result.table, result.cosines, brute.sums(), CASTS)
    assert result.table["share"][:4].sum() == pytest.approx(1, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "tolerance"),
    # GPT-2 alone computes everything in float64.
    every(3, [("gpt2", 1e-10), ("llama", CASTS), ("gemma2", CASTS), ("mixtral", CASTS)]),
)
def test_the_same_holds_for_other_architectures(name, tolerance):
    policy = make_policy(name, torch.float64)
    batch = make_batch(policy, temperature=0.7)
    result = interval_gradients(policy, batch, loss=NARROW)
    assert_matches(result.table, result.cosines, brute_force(policy, batch, NARROW).sums(), tolerance)


@pytest.mark.parametrize("alpha", [None, 0.3])
def test_on_policy_without_a_reference_the_weights_are_the_advantages_reweighted_or_not(policy, batch, alpha):
    batch = replace(batch, old_logprobs=None, ref_logprobs=None)
    settings = LossSettings(reweight_alpha=alpha)
    result = interval_gradients(policy, batch, loss=settings)
    assert_matches(result.table, result.cosines, brute_force(policy, batch, settings).sums(), CASTS)


def test_signal_and_noise_are_those_of_a_double_loop_over_prompts(policy, batch, brute):
    table = interval_gradients(policy, batch, loss=NARROW).table
    prompts = [3 * brute.sums({p}) for p in range(3)]  # draws whose mean is G
    for a in range(5):
        products = [(prompts[p][a] @ prompts[q][a]).item() for p in range(3) for q in range(3) if p != q]
        mean = sum(vectors[a] for vectors in prompts) / 3
        noise = sum((vectors[a] - mean).square().sum().item() for vectors in prompts) / 2
        assert table["signal"][a] == pytest.approx(sum(products) / 6, rel=CASTS, abs=CASTS * noise)
        assert table["noise"][a] == pytest.approx(noise, rel=CASTS)
        assert table["signal_to_noise"][a] == pytest.approx(table["signal"][a] / table["noise"][a], rel=1e-12)
        assert table["norm"][a] ** 2 == pytest.approx(table["signal"][a] + table["noise"][a] / 3, rel=1e-12)


def test_the_half_cosine_is_between_two_sets_of_prompts_that_the_generator_draws(policy, batch, brute):
    splits = [({0, 1}, {2}), ({0, 2}, {1}), ({1, 2}, {0})]
    expected = [cosine(brute.sums(one)[4], brute.sums(other)[4]) for one, other in splits]
    drawn = set()
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        half_cosine = interval_gradients(policy, batch, loss=NARROW, generator=generator).table["half_cosine"]
        (split,) = [i for i, value in enumerate(expected) if half_cosine[4] == pytest.approx(value, rel=1e-4)]
        drawn.add(split)
        one, other = (brute.sums(half) for half in splits[split])
        for a in range(4):
            assert half_cosine[a] == pytest.approx(cosine(one[a], other[a]), CASTS, CASTS, nan_ok=True)
    assert len(drawn) > 1


@pytest.mark.parametrize("micro_batch_size", every(2, [1, 8]))
@pytest.mark.parametrize("padding", [(0, 0), (5, 2)])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_and_micro_batches_change_nothing_beyond_rounding(policy, batch, side, padding, micro_batch_size):
    expected = interval_gradients(policy, batch, loss=NARROW)
    moved = pad_both_sides(make_batch(policy, temperature=0.7, side=side), *padding)
    result = interval_gradients(policy, moved, loss=NARROW, resources=Resources(micro_batch=micro_batch_size))
    for frame in ("table", "cosines"):
        pd.testing.assert_frame_equal(getattr(result, frame), getattr(expected, frame), rtol=CASTS, atol=CASTS * 1e-2)


def test_a_group_of_equal_rewards_adds_nothing_but_counts_as_a_prompt(policy, batch):
    batch = replace(batch, rewards=torch.tensor([1.0, -1.0, 2.0, 2.0, 0.5, 3.0]), ref_logprobs=None)
    brute = brute_force(policy, batch, NARROW)
    assert all(w == 0 for w, p in zip(brute.weight, brute.prompt, strict=True) if p == 1)
    result = interval_gradients(policy, batch, loss=NARROW)
    assert result.num_prompts == 3
    assert_matches(result.table, result.cosines, brute.sums(), CASTS)
    prompts = [3 * brute.sums({p})[4] for p in range(3)]
    mean = sum(prompts) / 3
    assert result.table["noise"][4] == pytest.approx(
        sum((p - mean).square().sum().item() for p in prompts) / 2, rel=CASTS
    )


def test_an_interval_without_tokens_is_a_row_of_nan_and_changes_no_other(policy, batch):
    expected = interval_gradients(policy, batch, loss=NARROW)
    prob = torch.where(batch.response_mask, batch.old_logprobs, 0.0).exp().double()
    intervals = torch.bucketize(prob, torch.tensor(EDGES[1:-1], dtype=torch.float64), right=True)
    result = interval_gradients(
        policy, batch, loss=NARROW, intervals=intervals + (intervals > 1), edges=(0, 0.25, 0.5, 0.6, 0.75, 1)
    )
    assert result.table["label"][2] == "[½, 0.6)"
    assert result.table["num_tokens"][2] == 0
    assert result.table.loc[2, NUMBERS].isna().all()
    assert result.cosines.loc[2].isna().all()
    others = result.table.drop(2).reset_index(drop=True)
    pd.testing.assert_frame_equal(others[NUMBERS], expected.table[NUMBERS], rtol=1e-9)


def test_input_that_cannot_be_measured_is_refused(policy, batch):
    with refused("advantages"):
        interval_gradients(policy, replace(batch, advantages=torch.full_like(batch.old_logprobs, math.nan)))
    with refused():
        interval_gradients(policy, batch, intervals=torch.zeros(6, 3, dtype=torch.long))
    with refused():
        interval_gradients(policy, batch, intervals=torch.full(batch.input_ids.shape, 4))


# In the metric of the AdamW update


def warm_state(policy: Policy, **settings: float) -> tuple[torch.optim.AdamW, AdamWState]:
    """An AdamW without momentum and decay, some steps old, whose second moments span orders of magnitude."""
    max_grad_norm = settings.pop("max_grad_norm", None)
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=1e-3, weight_decay=0.0, **settings)
    generator = torch.Generator().manual_seed(5)
    for parameter in policy.model.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        optimizer.state[parameter] = {
            "step": torch.tensor(7.0),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": 1e-6 * (4 * noise).exp(),
        }
    state = copy.deepcopy(optimizer.state_dict())  # the optimizer goes on
    return optimizer, AdamWState.from_state_dict(policy.model, state, max_grad_norm=max_grad_norm)


def real_step(policy: Policy, optimizer: torch.optim.AdamW, gradient: Tensor, max_grad_norm: float | None) -> Tensor:
    """By how much torch's own AdamW moves the parameters on this flat gradient; they are put back afterwards."""
    parameters = list(policy.model.parameters())
    before = [p.detach().clone() for p in parameters]
    start = 0
    for parameter in parameters:
        parameter.grad = gradient[start : start + parameter.numel()].view_as(parameter).clone()
        start += parameter.numel()
    if max_grad_norm is not None:
        torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm)
    optimizer.step()
    moved = torch.cat([(p.detach() - b).flatten() for p, b in zip(parameters, before, strict=True)])
    with torch.no_grad():
        for parameter, value in zip(parameters, before, strict=True):
            parameter.copy_(value)
            parameter.grad = None
    return moved


@pytest.mark.parametrize("max_grad_norm", [None, 0.01])
def test_the_scale_of_any_part_is_the_closed_form_and_that_part_of_the_whole(policy, monkeypatch, max_grad_norm):
    _, state = warm_state(policy, max_grad_norm=max_grad_norm)
    held = dict(list(state.exp_avg_sq.items())[2:])  # the first two are not trained
    state = AdamWState(held, state.step, state.settings, max_grad_norm)
    slices = flat_slices(policy.model)
    gradient = torch.randn(sum(p.numel() for p in policy.model.parameters()))
    norm = torch.cat([gradient[slices[name]] for name in held]).double().norm().item()
    clip = 1.0 if max_grad_norm is None else max_grad_norm / (norm + 1e-6)
    assert state.clip_factor(norm**2) == pytest.approx(clip, rel=1e-12)
    whole = state.scale(policy.model, gradient)
    monkeypatch.setattr(adamw_state, "PART", 7)
    for name, place in slices.items():
        own = gradient[place]
        for rows in (None, slice(3, 20), slice(0, 1), slice(5, 5)):
            found = state.scale_part(name, own if rows is None else own[rows], clip, rows)
            assert torch.equal(found, whole[place] if rows is None else whole[place][rows])
        if name not in held:
            assert not whole[place].any()
            continue
        beta = state.settings[name].betas[1]
        second = (beta * held[name].flatten().double() + (1 - beta) * (clip * own.double()) ** 2) / (1 - beta**8)
        scale = clip / (second.sqrt() + state.settings[name].eps)
        torch.testing.assert_close(whole[place].double(), scale, rtol=1e-5, atol=0)
    # The norm is summed in parts then, which rounds in float64.
    torch.testing.assert_close(state.scale(policy.model, gradient), whole, rtol=1e-6, atol=0)


@pytest.mark.parametrize("max_grad_norm", every(3, [None, 0.01, 100.0]))
def test_the_adamw_metric_is_that_of_the_step_that_torch_takes(batch, max_grad_norm):
    policy = make_policy("gpt2", torch.float64)  # float64 all through
    brute = brute_force(policy, batch, NARROW).sums()
    optimizer, state = warm_state(policy, betas=(0.8, 0.95), eps=1e-5, max_grad_norm=max_grad_norm)
    result = interval_gradients(policy, batch, loss=NARROW, optimizer_state=state)
    moved = real_step(policy, optimizer, brute[4], max_grad_norm)
    factor = 1e-3 * (1 - 0.8) / (1 - 0.8**8)
    # Elementwise lr·(1 − β₁)/(1 − β₁^step) · preconditioned G: what torch adds to parameters of 1, rounded there.
    scaled = state.scale(policy.model, brute[4]) * brute
    torch.testing.assert_close(-factor * scaled[4], moved, rtol=1e-10, atol=1e-15)
    assert result.adamw_table["norm"][4] * factor == pytest.approx(moved.norm().item(), rel=1e-9)
    assert_matches(result.adamw_table, result.adamw_cosines, scaled, 1e-8)
    assert result.adamw_table["share"][:4].sum() == pytest.approx(1, rel=1e-12)
    assert (result.adamw_table["share"] - result.table["share"]).abs().max() > 1e-3


def test_signal_and_noise_in_the_adamw_metric_are_those_of_the_scaled_prompt_gradients(policy, batch, brute):
    state = warm_state(policy)[1]
    table = interval_gradients(policy, batch, loss=NARROW, optimizer_state=state).adamw_table
    scale = state.scale(policy.model, brute.sums()[4])
    prompts = [3 * scale * brute.sums({p}) for p in range(3)]
    for a in range(5):
        mean = sum(vectors[a] for vectors in prompts) / 3
        noise = sum((vectors[a] - mean).square().sum().item() for vectors in prompts) / 2
        assert table["noise"][a] == pytest.approx(noise, rel=1e-5)
        assert table["signal"][a] == pytest.approx(mean.square().sum().item() - noise / 3, rel=1e-5, abs=1e-5 * noise)


def test_a_state_dict_is_read_in_any_order_of_parameters(policy):
    named = dict(policy.model.named_parameters())
    order = sorted(named, reverse=True)
    groups = [{"params": [named[n] for n in order[:9]], "weight_decay": 0.1}, {"params": [named[n] for n in order[9:]]}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    for i, name in enumerate(order):
        moments = {"exp_avg": torch.zeros_like(named[name]), "exp_avg_sq": torch.full_like(named[name], float(i))}
        optimizer.state[named[name]] = {"step": torch.tensor(float(i)), **moments}
    state = optimizer.state_dict()
    for group, names in zip(state["param_groups"], (order[:9], order[9:]), strict=True):
        group["param_names"] = names
    result = AdamWState.from_state_dict(policy.model, state)
    for i, name in enumerate(order):
        assert result.step[name] == i
        assert (result.exp_avg_sq[name] == i).all()
    with refused("groups of 9"):
        AdamWState.from_state_dict(policy.model, optimizer.state_dict())


def test_optimizers_whose_metric_is_not_this_one_are_refused(policy):
    model, parameters = policy.model, list(policy.model.parameters())
    others = [torch.optim.AdamW(parameters, amsgrad=True), torch.optim.AdamW(parameters, maximize=True)]
    others += [
        torch.optim.Adam(parameters, weight_decay=0.1),
        torch.optim.RAdam(parameters, decoupled_weight_decay=True),
    ]
    for optimizer in others:
        with refused():
            AdamWState.from_state_dict(model, optimizer.state_dict())
    for flag, value in {"bias_correction": False, "correct_bias": False, "nesterov": True}.items():
        state = torch.optim.AdamW(parameters).state_dict()
        state["param_groups"][0][flag] = value  # as DeepSpeed's FusedAdam, transformers 4's AdamW, AdamP
        with refused():
            AdamWState.from_state_dict(model, state)
    with refused():
        AdamWState.from_state_dict(model, torch.optim.AdamW(parameters[:3]).state_dict())
