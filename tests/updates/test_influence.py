"""Contributions to a step, against an optimizer's step split by hand, the step itself, and loops over tokens."""

import copy
import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from support.oracle import TrueFloat64
from support.policies import make_batch, make_policy
from support.refusals import refused
from support.steps import NARROW, STEPS, Brute, assert_split_as, brute_force, split_step, warm_state
from support.tiers import every

from gradscope.gradients import Resources
from gradscope.policy import AdamWState, Policy
from gradscope.rollouts import TokenBatch
from gradscope.updates import (
    StepSettings,
    apply_update,
    influence,
    influence_table,
    moved_against,
    movement_table,
    state_step,
)


@pytest.fixture(scope="module")
def policy() -> Policy:
    """GPT-2 alone computes everything in float64."""
    return make_policy("gpt2", torch.float64)


@pytest.fixture(scope="module")
def batch(policy) -> TokenBatch:
    return make_batch(policy, temperature=0.7)


@pytest.fixture(scope="module")
def brute(policy, batch) -> Brute:
    return brute_force(policy, batch, NARROW)


@pytest.mark.parametrize("step", STEPS)
def test_each_source_contributes_its_part_of_a_step_that_is_split_by_hand(policy, batch, brute, step):
    state = warm_state(policy) if step.optimizer == "adamw" else None
    result = influence(policy, batch, loss=NARROW, step=step, optimizer_state=state)
    assert (result.clip_factor < 1) == (step.max_grad_norm == 0.01)
    parts = split_step(policy, brute, step, state)
    assert all(part.any() for part in parts.values()) or step.weight_decay == 0
    assert_split_as(result, brute, parts, 1e-10)
    assert result.method == "forward mode"


def mean_entropy_slope(policy: Policy, batch: TokenBatch) -> torch.Tensor:
    """The gradient of the kept tokens' mean entropy, by one autograd call."""
    entropies, parameters = [], [*policy.model.parameters()]
    for row in range(len(batch)):
        ids, kept = batch.sequence(row)
        logits = policy.model(input_ids=ids[None], use_cache=False).logits[0, kept - 1].double()
        logprobs = torch.log_softmax(logits / batch.temperature[row], -1)
        entropies.append(-(logprobs.exp() * logprobs).sum(-1))
    found = torch.autograd.grad(torch.cat(entropies).mean(), parameters, allow_unused=True)
    pairs = zip(parameters, found, strict=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for p, g in pairs])


@pytest.mark.parametrize("step", STEPS)
def test_what_each_source_and_each_token_does_to_the_mean_entropy(policy, batch, brute, step):
    state = warm_state(policy) if step.optimizer == "adamw" else None
    result = influence(policy, batch, loss=NARROW, step=step, optimizer_state=state)
    slope = mean_entropy_slope(policy, batch)
    parts = split_step(policy, brute, step, state)
    expected = {name: float(slope @ part) for name, part in parts.items()}
    assert result.entropy == pytest.approx(expected, rel=1e-9)
    own = result.contributions["entropy_part"].to_numpy()
    of_the_loss = sum(value for name, value in expected.items() if name == "kl" or name.isdigit())
    assert own.sum() == pytest.approx(of_the_loss, rel=1e-9)
    # Entry by entry, a token's gradient is scaled as the whole gradient is.
    whole = sum(brute.gradients().values())
    scaled = sum(part for name, part in parts.items() if name == "kl" or name.isdigit())
    scale = torch.where(whole != 0, scaled / whole, 0.0)
    weights = -(torch.tensor(brute.policy) + torch.tensor(brute.kl)).double() / len(brute.kl)
    np.testing.assert_allclose(own, (weights * (brute.jacobian @ (scale * slope))).numpy(), rtol=1e-7, atol=1e-15)


@pytest.mark.parametrize("step", every(2, STEPS))
def test_gradients_that_are_known_beforehand_give_the_same_split(policy, batch, step):
    loss = replace(NARROW, kl_coef=0.0)
    brute = brute_force(policy, batch, loss)
    known = torch.stack([brute.gradients()[str(interval)] for interval in range(4)])
    before = known.clone()
    state = warm_state(policy) if step.optimizer == "adamw" else None
    result = influence(policy, batch, loss=loss, step=step, optimizer_state=state, gradients=known)
    assert_split_as(result, brute, split_step(policy, brute, step, state), 1e-10)
    assert torch.equal(known, before)


@pytest.mark.parametrize("step", STEPS)
def test_the_split_adds_up_to_the_step_that_the_trainer_takes(policy, batch, brute, step):
    state = warm_state(policy) if step.optimizer == "adamw" else None
    movement = apply_update(policy, batch, loss=NARROW, step=step, optimizer_state=state)
    result = influence(policy, batch, loss=NARROW, step=step, optimizer_state=state)
    assert result.update_norm == pytest.approx(movement.update_norm, rel=1e-9)
    (taken,) = movement.results
    assert result.clip_factor == pytest.approx(taken.grad_norm_clipped / taken.grad_norm, rel=1e-9)


GROUPS = [
    {"lr": 2e-3, "betas": (0.7, 0.9), "eps": 1e-5, "weight_decay": 0.3},
    {"lr": 1e-4, "betas": (0.9, 0.99), "eps": 1e-7, "weight_decay": 0.0},
    {"lr": 5e-4, "betas": (0.7, 0.9), "eps": 1e-5, "weight_decay": 0.1},
]


def grouped_state(policy: Policy) -> dict:
    """A warm state in three groups that share nothing."""
    state = warm_state(policy)
    (whole,) = state["param_groups"]
    indices, names = whole["params"], whole["param_names"]
    parts = [slice(place, None, 3) for place in range(3)]
    told = zip(GROUPS, parts, strict=True)
    groups = [whole | own | {"params": indices[part], "param_names": names[part]} for own, part in told]
    return state | {"param_groups": groups}


def step_of_torch(policy: Policy, gradient: torch.Tensor, state: dict, clip: float) -> torch.Tensor:
    """Δθ of torch's own AdamW with this state on a flat gradient, clipped by hand."""
    model = copy.deepcopy(policy.model)
    named, start = dict(model.named_parameters()), 0
    for parameter in named.values():
        parameter.grad = clip * gradient[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()
    groups = [{"params": [named[name] for name in group["param_names"]]} for group in state["param_groups"]]
    optimizer = torch.optim.AdamW(groups)
    optimizer.load_state_dict(copy.deepcopy(state))
    optimizer.step()
    pairs = zip(model.parameters(), policy.model.parameters(), strict=True)
    return torch.cat([(new - old).detach().flatten() for new, old in pairs])


@pytest.mark.parametrize("memory", [None, 1], ids=["whole", "sliced"])
def test_every_parameter_group_steps_with_its_own_rate_decay_betas_and_eps(policy, batch, brute, memory):
    state = grouped_state(policy)
    step = state_step(state)
    assert (step.learning_rate, step.weight_decay, step.betas, step.eps) == (None,) * 4
    gradient = sum(brute.gradients().values())
    wanted = step_of_torch(policy, gradient, state, min(1.0, 1 / (gradient.norm().item() + 1e-6)))
    given = {"loss": NARROW, "step": step, "optimizer_state": state}
    resources = None if memory is None else Resources(gradient.nbytes + memory)  # no room for moments
    movement = apply_update(policy, batch, displacement=True, resources=resources, **given)
    torch.testing.assert_close(movement.displacement, wanted, rtol=1e-9, atol=1e-13)
    result = influence(policy, batch, **given)
    predicted = (brute.jacobian @ wanted).numpy()
    np.testing.assert_allclose(result.contributions["predicted"], predicted, rtol=1e-8, atol=1e-12)
    # A number of the step is for all groups.
    one = replace(step, learning_rate=1e-4, weight_decay=0.0)
    for group in (own := copy.deepcopy(state))["param_groups"]:
        group |= {"lr": 1e-4, "weight_decay": 0.0}
    same = apply_update(policy, batch, loss=NARROW, step=one, optimizer_state=state, displacement=True)
    wanted = step_of_torch(policy, gradient, own, min(1.0, 1 / (gradient.norm().item() + 1e-6)))
    torch.testing.assert_close(same.displacement, wanted, rtol=1e-9, atol=1e-13)


def test_the_metric_of_several_groups_is_that_of_their_step(policy, batch, brute):
    # Without first moments and decay, and after many steps, torch's step is the scaled gradient alone.
    state = grouped_state(policy)
    for moments in state["state"].values():
        moments["exp_avg"].zero_()
        moments["step"] = torch.tensor(1e6)
    for group in state["param_groups"]:
        group["weight_decay"] = 0.0
    gradient = sum(brute.gradients().values())
    clip = min(1.0, 1 / (gradient.norm().item() + 1e-6))
    scale = AdamWState.from_state_dict(policy.model, state, max_grad_norm=1.0).scale(policy.model, gradient)
    largest = max(group["lr"] * (1 - group["betas"][0]) for group in GROUPS)
    wanted = step_of_torch(policy, gradient, state, clip)
    torch.testing.assert_close(-largest * scale * gradient, wanted, rtol=1e-9, atol=1e-14)


def test_what_the_optimizer_does_not_hold_is_not_moved(policy, batch, brute):
    held = [n for n, _ in policy.model.named_parameters() if "h.1.mlp" in n or "wte" in n][::-1]
    state = warm_state(policy, held)
    result = influence(policy, batch, loss=NARROW, step=STEPS[2], optimizer_state=state)
    parts = split_step(policy, brute, STEPS[2], state)
    assert 0 < sum(parts.values()).count_nonzero() < 0.5 * brute.jacobian.shape[1]
    assert_split_as(result, brute, parts, 1e-10)


@pytest.mark.parametrize("name", every(4, ["qwen2", "llama", "gemma2", "mixtral"]))
@pytest.mark.parametrize("step", [STEPS[0], STEPS[2]])
def test_the_same_holds_for_other_architectures(name, step):
    policy = make_policy(name, torch.float64)
    batch = make_batch(policy, temperature=0.7, side="left")
    state = warm_state(policy) if step.optimizer == "adamw" else None
    with TrueFloat64():
        brute = brute_force(policy, batch, NARROW)
        result = influence(policy, batch, loss=NARROW, step=step, optimizer_state=state)
    assert_split_as(result, brute, split_step(policy, brute, step, state), 1e-9)


@pytest.mark.parametrize("name", every(2, ["gpt2", "llama"]))
@pytest.mark.parametrize("step", every(2, [STEPS[2], STEPS[0]]))
def test_the_error_of_the_prediction_falls_linearly_with_the_step_size(name, step):
    policy = make_policy(name, torch.float64)
    batch = make_batch(policy)
    state = warm_state(policy) if step.optimizer == "adamw" else None
    rates, errors, entropies = [4.0**-k * 4e-3 for k in range(4)], [], []
    for rate in rates:
        keywords = {"loss": NARROW, "step": replace(step, learning_rate=rate), "optimizer_state": state}
        with TrueFloat64():
            table = movement_table([apply_update(policy, batch, **keywords)])
            found = influence(policy, batch, **keywords)
        actual, predicted = table["delta_logprob.all"], found.contributions["predicted"]
        errors.append(np.sqrt(np.mean((actual - predicted) ** 2) / np.mean(actual**2)))
        entropies.append(abs(sum(found.entropy.values()) / table["delta_entropy.all"].mean() - 1))
    assert errors[0] < 0.1 and entropies[-1] < 0.05
    assert np.polyfit(np.log(rates), np.log(entropies), 1)[0] == pytest.approx(1, abs=0.3)
    assert np.polyfit(np.log(rates), np.log(errors), 1)[0] == pytest.approx(1, abs=0.15)


def test_input_that_cannot_be_predicted_is_refused(policy, batch):
    state, infinite = warm_state(policy), torch.full_like(batch.old_logprobs, math.inf)
    with refused():
        influence(policy, batch, optimizer_state=state)
    with refused():
        influence(policy, batch, step=StepSettings("adamw"), optimizer_state=state)
    with refused("bfloat16"):
        influence(make_policy("gpt2", torch.bfloat16), batch)
    with refused():
        influence(policy, replace(batch, rewards=None))
    with refused("advantages"):
        influence(policy, replace(batch, advantages=infinite))
    with refused():
        influence(policy, replace(batch, response_mask=torch.zeros_like(batch.response_mask)))
    with refused("learning_rate"):
        influence(policy, batch, step=StepSettings(learning_rate=-1))
    with refused():
        influence_table(pd.DataFrame({"interval": [0]}), seed=None)
    with refused():
        moved_against(made_up(), 0)


# Statistics of contributions


def made_up(tokens: int = 60, groups: int = 5) -> pd.DataFrame:
    """Random contributions of three intervals, the KL and momentum; interval 2 has tokens in a single group."""
    rng = np.random.default_rng(3)
    table = pd.DataFrame({"group": rng.integers(0, groups, tokens), "interval": rng.integers(0, 2, tokens)})
    table.loc[table["group"] == 1, "interval"] = rng.integers(0, 3, (table["group"] == 1).sum())
    table["advantage"] = rng.integers(-1, 2, tokens) * 0.5
    for k, name in enumerate(("0", "1", "2", "kl", "momentum")):
        table[f"by.{name}"] = rng.normal(0.2 * k, 1, tokens)
    return table.assign(predicted=table.filter(like="by.").sum(axis=1))


def naive(tokens: list[dict], source: str) -> list[float]:
    """mean |c|, mean c and Cov(c, Δ)/Var(Δ) by loops over tokens."""
    n = len(tokens)
    if n == 0:
        return [math.nan] * 3
    mean = sum(t[f"by.{source}"] for t in tokens) / n
    whole = sum(t["predicted"] for t in tokens) / n
    covariance = sum((t[f"by.{source}"] - mean) * (t["predicted"] - whole) for t in tokens) / n
    variance = sum((t["predicted"] - whole) ** 2 for t in tokens) / n
    share = covariance / variance if variance > 1e-12 else math.nan
    return [sum(abs(t[f"by.{source}"]) for t in tokens) / n, mean, share]


@pytest.mark.usefixtures("few_prompts_are_many")
def test_the_table_and_its_bounds_are_those_of_loops_over_tokens_and_redrawn_prompts():
    table = made_up()
    found = influence_table(table, seed=np.random.default_rng(8), resamples=40, confidence=0.9)
    assert [*found["source"].unique()] == [0, 1, 2, "kl", "momentum"]
    assert [*found["target"].unique()] == [0, 1, 2, "all"]
    tokens, rng = table.to_dict("records"), np.random.default_rng(8)
    for target in (0, 1, 2, "all"):
        inside = [t for t in tokens if target in ("all", t["interval"])]
        draws = rng.multinomial(5, np.full(5, 0.2), size=40)
        for source in (0, 1, 2, "kl", "momentum"):
            (row,) = found[(found["source"] == source) & (found["target"] == target)].to_dict("records")
            assert row["num_tokens"] == len(inside)
            wanted = naive(inside, source)
            redrawn = [naive([t for t in inside for _ in range(draw[t["group"]])], source) for draw in draws]
            for k, name in enumerate(("mean_abs", "mean", "share")):
                assert row[name] == pytest.approx(wanted[k], rel=1e-9)
                bounds = np.nanquantile([values[k] for values in redrawn], [0.05, 0.95])
                if target == 2:
                    bounds = [math.nan, math.nan]  # one prompt says nothing about prompts
                assert [row[f"{name}_lower"], row[f"{name}_upper"]] == pytest.approx(bounds, rel=1e-9, nan_ok=True)


def test_tokens_moved_against_their_advantage_are_ranked_and_say_by_whom():
    table = made_up()
    expected = []
    for token in table.to_dict("records"):
        if token["advantage"] * token["predicted"] < 0:
            sign = 1 if token["predicted"] > 0 else -1
            pushes = {name.removeprefix("by."): sign * token[name] for name in token if name.startswith("by.")}
            mover = max(pushes, key=pushes.get)
            expected.append((abs(token["predicted"]), mover, pushes[mover]))
    expected.sort(reverse=True)
    found = moved_against(table, 4)
    assert list(found[["against", "mover", "mover_change"]].itertuples(index=False, name=None)) == expected[:4]
    assert len(moved_against(table, 1000)) == len(expected) < 60
