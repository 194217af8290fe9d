"""What updates do to tokens, against plain torch optimizers on one forward pass per response, without padding."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from support.passes_by_loop import by_loop
from support.policies import make_batch, make_policy, pad_both_sides
from support.progress import Listener
from support.refusals import refused
from support.tiers import every
from torch import Tensor, nn

from gradscope.gradients import Resources
from gradscope.objective import LossSettings, TokenStatistics, Updater, make_weighting
from gradscope.objective.equations import grpo_advantages, policy_loss
from gradscope.objective.logprobs import token_statistics
from gradscope.policy import Policy, float_parameters
from gradscope.rollouts import TokenBatch
from gradscope.trainer import TrainConfig
from gradscope.trainer.step import plan_update
from gradscope.updates import (
    UPDATES,
    StepSettings,
    apply_update,
    apply_updates,
    make_update,
    movement_table,
)
from gradscope.updates.movement import Movement

# Old log-probabilities lie about 0.1 off the policy's: clips this narrow are active on every side.
NARROW = {"clip_ratio_low": 0.05, "clip_ratio_high": 0.04, "clip_ratio_c": 1.1, "kl_coef": 0.2}
SETTINGS = LossSettings(**NARROW)
# No number is torch's default.
NUMBERS = {"weight_decay": 0.3, "betas": (0.8, 0.99), "eps": 1e-6}
ADAMW = StepSettings("adamw", 2e-3, **NUMBERS)
CPU = torch.device("cpu")


# ---- the reference


def all_logprobs(policy: Policy, batch: TokenBatch, row: int) -> Tensor:
    """log softmax of what predicts each token of a response that stands alone, [n, N], the first one apart."""
    ids, _ = batch.sequence(row)
    logits = policy.model(input_ids=ids[None], use_cache=False).logits[0, :-1]
    return torch.log_softmax(logits / batch.temperature[row].to(logits), -1)


def logprobs_alone(policy: Policy, batch: TokenBatch) -> Tensor:
    """log π of every real token, [B, S], a forward pass per response."""
    rows = []
    for row in range(len(batch)):
        first, ids = int(batch.attention_mask[row].int().argmax()), batch.sequence(row)[0]
        own = all_logprobs(policy, batch, row).gather(1, ids[1:, None])[:, 0]
        after = batch.input_ids.shape[1] - first - len(ids)
        rows.append(nn.functional.pad(own, (first + 1, after)))
    return torch.stack(rows)


@torch.no_grad()
def statistics_by_loop(policy: Policy, batch: TokenBatch) -> pd.DataFrame:
    """log π, log(1−π) as a sum over the others, and entropy, of every kept token."""
    rows = []
    for row in range(len(batch)):
        ids, kept = batch.sequence(row)
        logprobs = all_logprobs(policy, batch, row)
        for t in kept.tolist():
            others = torch.cat([logprobs[t - 1, : ids[t]], logprobs[t - 1, ids[t] + 1 :]])
            entropy = -(logprobs[t - 1].exp() * logprobs[t - 1]).sum()
            rows.append([logprobs[t - 1, ids[t]].item(), others.logsumexp(0).item(), entropy.item()])
    return pd.DataFrame(rows, columns=["logprob", "log_one_minus_prob", "entropy"])


def update_by_hand(
    policy: Policy, batch: TokenBatch, passes: list, settings: LossSettings, optimizer: Any, max_norm: float | None
) -> list[float]:
    """An optimizer step for each pass that has a token; gradient norms before clipping."""
    norms = []
    for _, rows, tokens, count in passes:
        if not tokens.any():
            continue
        logprobs = logprobs_alone(policy, batch)[rows]
        old, advantages = batch.old_logprobs[rows].double(), batch.advantages[rows].double()
        if settings.reweight_alpha is not None:
            advantages = advantages * (settings.reweight_alpha * old.exp() + 1 - settings.reweight_alpha)
        loss = policy_loss(
            logprobs,
            old,
            advantages,
            tokens,
            **NARROW,
            ref_logprobs=batch.ref_logprobs[rows].double(),
            num_tokens=count,
        )
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(policy.model.parameters(), math.inf if max_norm is None else max_norm)
        norms.append(norm.item())
        optimizer.step()
    return norms


def twin(policy: Policy) -> Policy:
    return replace(policy, model=copy.deepcopy(policy.model))


@dataclass(frozen=True)
class Start:
    """Where an update starts: a policy, its optimizer's settings, and what that one has saved."""

    policy: Policy
    step: StepSettings
    state: dict[str, Any] | None = None

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Of torch, straight from its documentation."""
        step = self.step
        if step.optimizer == "sgd":
            return torch.optim.SGD(model.parameters(), lr=step.learning_rate, weight_decay=step.weight_decay)
        optimizer = torch.optim.AdamW(model.parameters(), lr=step.learning_rate, **NUMBERS)
        if self.state is not None:
            optimizer.load_state_dict(copy.deepcopy(self.state))
            optimizer.param_groups[0].update(lr=step.learning_rate, weight_decay=step.weight_decay)
        return optimizer


@pytest.fixture(scope="module")
def policy() -> Policy:
    """GPT-2, all of which is computed in float64; its head is its embedding."""
    return make_policy("gpt2", torch.float64)


@pytest.fixture(scope="module")
def batch(policy) -> TokenBatch:
    """Six responses to three prompts at T = 0.7, padded on the left, with holes and advantages per token."""
    batch = make_batch(policy, temperature=0.7, side="left")
    advantages = torch.randn(batch.input_ids.shape, generator=torch.Generator().manual_seed(4))
    return replace(batch, advantages=advantages)


@pytest.fixture(scope="module")
def starts(policy, batch) -> dict[str, Start]:
    trained = twin(policy)
    optimizer = torch.optim.AdamW(trained.model.parameters(), lr=2e-4, **NUMBERS | {"weight_decay": 0.03})
    earlier = make_batch(policy, seed=9)
    earlier = replace(earlier, advantages=torch.ones(earlier.input_ids.shape))
    whole = [("all", list(range(6)), earlier.response_mask, earlier.num_tokens)]
    for _ in range(4):
        update_by_hand(trained, earlier, whole, SETTINGS, optimizer, 1.0)
    trained.model.zero_grad()
    return {
        "sgd": Start(policy, StepSettings(learning_rate=0.05, weight_decay=0.1, max_grad_norm=0.3)),
        "adamw, fresh": Start(policy, ADAMW),
        "adamw, saved": Start(trained, replace(ADAMW, max_grad_norm=None), optimizer.state_dict()),
    }


def passes_by_loop(name: str, batch: TokenBatch, size: int | None) -> list:
    """Of a random split, which a loop cannot know: as they were drawn."""
    if name != "random-split":
        return by_loop(name, batch, size=size)
    rows = torch.arange(len(batch)).split(len(batch) if size is None else size)
    drawn = make_update(name, batch, mini_batch_size=size).steps
    return [
        (part.name, mini.tolist(), part.batch.response_mask, part.num_tokens)
        for part, mini in zip(drawn, [*rows, *rows], strict=True)
    ]


# ---- the movement


@pytest.mark.parametrize("name", every(4, UPDATES))
@pytest.mark.parametrize("kind", ["sgd", "adamw, fresh", "adamw, saved"])
def test_every_token_moves_as_under_a_hand_written_loop(starts, batch, kind, name):
    start, size = starts[kind], 4 if kind == "adamw, fresh" else None
    update = make_update(name, batch, loss=SETTINGS, mini_batch_size=size)
    choices = {"step": start.step, "optimizer_state": start.state}
    movement = apply_update(start.policy, batch, update, loss=SETTINGS, **choices)
    hand = twin(start.policy)
    before = statistics_by_loop(hand, batch)
    passes = passes_by_loop(name, batch, size)
    settings = replace(SETTINGS, reweight_alpha=0.3) if name.startswith("reweight") else SETTINGS
    optimizer = start.make_optimizer(hand.model)
    norms = update_by_hand(hand, batch, passes, settings, optimizer, start.step.max_grad_norm)
    after = statistics_by_loop(hand, batch)

    table = movement_table([movement])
    moved = after - before
    assert moved["logprob"].abs().max() > 1e-3
    odds = moved["logprob"] - moved["log_one_minus_prob"]
    change = after["logprob"].map(math.exp) - before["logprob"].map(math.exp)
    wanted = {"delta_logprob": moved["logprob"], "delta_log_odds": odds, "delta_prob": change}
    for column, values in wanted.items():
        # Sums of float64 in another order; AdamW divides by a root as small as that of a gradient near 0.
        np.testing.assert_allclose(table[f"{column}.{name}"], values, rtol=1e-6, atol=1e-10)
    assert [r.grad_norm for r in movement.results if r.outcome == "taken"] == pytest.approx(norms, rel=1e-9)
    pairs = zip(hand.model.parameters(), start.policy.model.parameters(), strict=True)
    distance = math.sqrt(sum((a - b).square().sum().item() for a, b in pairs))
    assert movement.update_norm == pytest.approx(distance, rel=1e-7)


def test_a_weighting_is_an_update_by_its_name_and_by_itself(policy, batch):
    names = ["without-0", "mask:low=0,high=0.25", make_weighting("mask:low=0,high=.25")]
    plain, *weighted = movement_table(apply_updates(policy, batch, names)).filter(like="delta_logprob.").to_numpy().T
    assert np.abs(plain).max() > 1e-5
    for found in weighted:
        np.testing.assert_allclose(found, plain, rtol=1e-6, atol=1e-12)


def test_clipping_was_at_work_in_the_loops_above(starts, batch):
    [result] = apply_update(starts["sgd"].policy, batch, loss=SETTINGS, step=starts["sgd"].step).results
    assert result.grad_norm > 0.4
    assert result.grad_norm_clipped == pytest.approx(0.3, rel=1e-4)
    assert min(result.clipped_low, result.clipped_high, result.clipped_dual) >= 1


@pytest.mark.parametrize("adamw", [False, True], ids=["sgd", "adamw"])
def test_lopti_ends_at_the_trainers_weights_bit_for_bit(adamw):
    policy = make_policy("qwen2", attention="sdpa")
    batch = make_batch(policy, temperature=0.7)
    batch = replace(batch, advantages=batch.spread_over_tokens(grpo_advantages(batch.rewards, batch.group_ids)))
    config = TrainConfig(**NARROW, lopti_eta=0.5, reweight_alpha=0.3, mini_batch_size=4, micro_batch_size=2)
    trained = copy.deepcopy(policy.model)
    if adamw:
        optimizer = torch.optim.AdamW(trained.named_parameters(), lr=2e-3, **NUMBERS)
    else:
        optimizer = torch.optim.SGD(trained.parameters(), lr=1e-3)
    updater = Updater(trained, optimizer, CPU, config.micro_batch_size, config.max_grad_norm)
    update = plan_update(batch, config, torch.Generator().manual_seed(0))
    results = [updater.step(part, update.settings, match=update.match) for part in update.steps]

    weights: list[dict[str, Tensor]] = []
    policy.model.register_forward_hook(lambda *_: weights.append(copy.deepcopy(dict(policy.model.named_parameters()))))
    step, resources = ADAMW if adamw else StepSettings(), Resources(micro_batch=2)
    made = make_update("reweight-lopti:alpha=0.3,eta=0.5", batch, loss=SETTINGS, mini_batch_size=4)
    movement = apply_update(policy, batch, made, loss=SETTINGS, step=step, resources=resources)
    assert movement.results == results
    assert [r.name for r in results] == ["low", "low", "high", "high"]
    start, *_, end = weights
    for name, parameter in trained.named_parameters():
        assert torch.equal(start[name], dict(policy.model.named_parameters())[name])
        assert torch.equal(end[name], parameter)
        assert not torch.equal(end[name], start[name])


def test_padding_and_micro_batches_change_only_rounding(policy, batch):
    usual = movement_table([apply_update(policy, batch, "lopti", loss=SETTINGS)])
    for size in (1, 2, 5):
        other = pad_both_sides(batch, 2, 3)
        found = apply_update(policy, other, "lopti", loss=SETTINGS, resources=Resources(micro_batch=size))
        pd.testing.assert_frame_equal(movement_table([found]), usual, rtol=1e-9, atol=1e-13)


# ---- the optimizer's state


def test_a_state_that_names_its_parameters_is_read_by_name_and_trains_those_alone(starts, batch):
    start = starts["adamw, saved"]
    named = float_parameters(start.policy.model)
    order = [5, 3, 17, 0]
    state = {
        "state": {place: start.state["state"][index] for place, index in enumerate(order[:3])},  # the last: no step yet
        "param_groups": [
            start.state["param_groups"][0] | {"params": [2, 0], "param_names": [named[17][0], named[5][0]]},
            start.state["param_groups"][0] | {"params": [1, 3], "param_names": [named[3][0], named[0][0]]},
        ],
    }
    hand = twin(start.policy)
    parameters = list(hand.model.parameters())
    optimizer = torch.optim.AdamW([parameters[i] for i in order], lr=2e-3, **NUMBERS)
    own = optimizer.state_dict()
    optimizer.load_state_dict({"state": copy.deepcopy(state["state"]), "param_groups": own["param_groups"]})
    for index, parameter in enumerate(parameters):
        parameter.requires_grad_(index in order)
    whole = by_loop("all", batch)
    update_by_hand(hand, batch, whole, SETTINGS, optimizer, 1.0)
    movement = apply_update(start.policy, batch, loss=SETTINGS, step=ADAMW, optimizer_state=state)
    wanted = statistics_by_loop(hand, batch)["logprob"]
    found = movement.after.logprob[batch.response_mask]
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-10)


def broken(state: dict[str, Any], change: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    state = copy.deepcopy(state)
    change(state)
    return state


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s["param_groups"][0]["params"].pop(),
        lambda s: s["state"][3].pop("exp_avg"),
        lambda s: s["state"][3].update(exp_avg=torch.zeros(2)),
        lambda s: s["state"][3].update(exp_avg_sq=torch.zeros(2)),
        lambda s: s["param_groups"][0].update(betas=(0.9, 0.95)),
        lambda s: s["param_groups"][0].update(eps=1e-5),
        lambda s: s["param_groups"][0].update(amsgrad=True),
        lambda s: s.update(param_groups=[]),
        lambda s: s["state"][3]["exp_avg"].fill_(float("nan")),
        lambda s: s["state"][3]["exp_avg_sq"].neg_(),
        lambda s: s["param_groups"][0].pop("betas"),
        lambda s: s.pop("state"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_in_one_line(starts, batch, change):
    start = starts["adamw, saved"]
    with refused():
        apply_update(start.policy, batch, step=ADAMW, optimizer_state=broken(start.state, change))


# ---- several updates side by side


def test_several_updates_share_the_statistics_before_and_each_starts_from_the_same_weights(policy, batch, capsys):
    alone = [movement_table([apply_update(policy, batch, name)]) for name in ("lopti", "only-3")]
    movements = apply_updates(policy, batch, ["lopti", "only-3"])
    assert movements[0].before is movements[1].before
    assert capsys.readouterr().err == ""
    table = movement_table(movements)
    for single in alone:
        pd.testing.assert_frame_equal(table[single.columns], single)
    apply_updates(policy, batch, ["all"], resources=Resources(progress=(told := Listener())))
    steps = [stage for stage in told.stages if stage.name == "taking steps"]
    assert [(stage.total, stage.done) for stage in steps] == [(1, 1)]


def test_rows_are_the_kept_tokens_by_response_and_position_with_what_a_loop_says_of_them(policy, batch):
    edges = (0.0, 0.3, 1.0)
    moved = apply_update(policy, batch, loss=SETTINGS)
    table = movement_table([moved], edges=edges)
    before = statistics_by_loop(policy, batch)
    rows = []
    for response in range(len(batch)):
        for column in range(batch.input_ids.shape[1]):
            if not batch.response_mask[response, column]:
                continue
            logprob, others, entropy = before.iloc[len(rows)]
            old, advantage = batch.old_logprobs[response, column].item(), batch.advantages[response, column].item()
            ratio = math.exp(logprob - old)
            clipped = (advantage > 0 and ratio > 1.04) or (advantage < 0 and (ratio < 0.95 or ratio > 1.1))
            position = column - int(batch.response_start[response])
            keys = (response, position, int(batch.input_ids[response, column]), int(batch.group_ids[response]))
            numbers = (advantage, math.exp(logprob), math.exp(old), others, entropy, int(math.exp(old) >= 0.3))
            rows.append((*keys, *numbers, 0.0 if clipped else ratio * advantage))
    columns = ["response", "position", "token_id", "group", "advantage", "prob", "old_prob", "log_one_minus_prob"]
    columns += ["entropy", "interval", "weight"]
    wanted = pd.DataFrame(rows, columns=columns)
    changes = ["delta_prob.all", "delta_logprob.all", "delta_log_odds.all", "delta_entropy.all"]
    assert list(table.columns) == [*columns, *changes]
    entropies = moved.after.entropy[batch.response_mask].numpy() - wanted["entropy"]
    np.testing.assert_allclose(table["delta_entropy.all"], entropies, rtol=0, atol=1e-6)
    pd.testing.assert_frame_equal(table[columns], wanted, check_dtype=False, rtol=1e-6)
    assert 0 < (wanted["weight"] == 0).sum() < len(wanted)
    other = movement_table([moved], edges=(0.0, 0.9, 1.0))
    assert other["interval"].tolist() == [int(p >= 0.9) for p in wanted["old_prob"]]


# ---- near the ends


def two_logits(gaps: Tensor) -> TokenStatistics:
    """Of a token whose logit is that much above the only other one's: π = 1 / (1 + e^−gap)."""
    return token_statistics(torch.stack([gaps, torch.zeros_like(gaps)], -1), torch.zeros(gaps.shape, dtype=torch.long))


def make_movement(before: TokenStatistics, after: TokenStatistics) -> Movement:
    """Of a batch of these tokens behind a prompt of one."""
    shape = before.logprob.shape
    mask = torch.ones(shape, dtype=torch.bool)
    mask[:, 0] = False
    batch = TokenBatch(
        input_ids=torch.zeros(shape, dtype=torch.long),
        attention_mask=torch.ones(shape, dtype=torch.bool),
        response_mask=mask,
        response_start=torch.ones(shape[0], dtype=torch.long),
        group_ids=torch.zeros(shape[0], dtype=torch.long),
        temperature=torch.ones(shape[0]),
        advantages=torch.ones(shape),
        old_logprobs=torch.full(shape, -1.0),
    )
    return Movement("x", batch, before, after, [], 0.0)


def test_changes_are_those_of_the_closed_form_from_one_end_to_the_other():
    gaps = torch.tensor([[0.0, -60.0, -20.7, -3.0, -0.1, 0.1, 3.0, 15.0, 20.7, 40.0]])
    step = 0.03125  # a power of two: float32 keeps the sums as they are, up to the gap's own rounding
    after = gaps + step
    table = movement_table([make_movement(two_logits(gaps), two_logits(after))])
    assert (table["prob"].tail(2) == 1.0).all()
    for row, (a, b) in enumerate(zip(gaps[0, 1:].tolist(), after[0, 1:].tolist(), strict=True)):
        # σ(b) − σ(a) = σ(b)·σ(−a)·(1 − e^(a − b)), of which no factor cancels.
        change = -math.expm1(a - b) / ((1 + math.exp(-b)) * (1 + math.exp(a)))
        rise = math.log1p(math.exp(-a)) - math.log1p(math.exp(-b)) if abs(a) < 30 else max(0.0, -a) - max(0.0, -b)
        # A float32 of 20 has steps of 2e-6, of 60 of 4e-6: relative to the step of 0.03 that is 1e-4.
        assert table["delta_prob.x"][row] == pytest.approx(change, rel=3e-4)
        assert table["delta_log_odds.x"][row] == pytest.approx(b - a, rel=3e-4)
        assert table["delta_logprob.x"][row] == pytest.approx(rise, rel=3e-4, abs=1e-7)


def test_tokens_whose_float32_probability_is_one_move_as_those_of_the_float64_model():
    exact = make_policy("gpt2", torch.float64, sharpness=24.0)
    batch = make_batch(exact, lengths=(20,) * 6, surprise=0.05)
    step = StepSettings(learning_rate=1e-3)
    table, wanted = (movement_table([apply_update(p, batch, step=step)]) for p in (make_float32(exact), exact))
    sure = (wanted["log_one_minus_prob"] < math.log(3e-8)) & (wanted["log_one_minus_prob"] > math.log(1e-11))
    assert sure.sum() >= 3
    assert (table["prob"][sure] == 1.0).all()
    odds = table["delta_log_odds.all"][sure]
    assert (odds != 0).all()
    # Logits near 40 have float32 rounding of 4e-6, some ten layers of it.
    np.testing.assert_allclose(odds, wanted["delta_log_odds.all"][sure], rtol=0.01, atol=5e-5)
    assert wanted["delta_log_odds.all"][sure].abs().max() > 1e-3


def make_float32(policy: Policy) -> Policy:
    return replace(policy, model=copy.deepcopy(policy.model).float())


# ---- what is refused


@pytest.mark.parametrize(
    "change",
    [
        {"advantages": None, "rewards": None},
        {"advantages": torch.full((6, 17), math.nan)},
        {"response_mask": torch.zeros(6, 17, dtype=torch.bool)},
        {"input_ids": torch.full((6, 17), 1000)},
    ],
)
def test_a_batch_that_cannot_be_trained_on_is_refused_in_one_line(policy, batch, change):
    with refused():
        apply_update(policy, replace(batch, **change))


@pytest.mark.parametrize(
    "choices",
    [
        {"learning_rate": -1.0},
        {"learning_rate": math.nan},
        {"weight_decay": math.inf},
        {"eps": -1e-8},
        {"betas": (0.9, 1.0)},
        {"max_grad_norm": 0.0},
    ],
)
def test_numbers_that_make_no_step_are_refused(policy, batch, choices):
    with refused(*choices):
        apply_update(policy, batch, step=StepSettings(**choices))


def test_a_table_takes_updates_of_the_same_tokens_from_the_same_weights_by_different_names(policy, batch):
    movement = apply_update(policy, batch)
    for others in [
        [],
        [movement, movement],
        [movement, apply_update(policy, batch.select([0, 1, 2]), "only-0")],
        [movement, apply_update(policy, batch, "only-0", loss=SETTINGS)],
        [movement, replace(movement, name="x", before=movement.after)],
    ]:
        with refused():
            movement_table(others)
