"""Gradients and optimizer steps of real models, against Eq. 1 as a loop over tokens and torch's own clipping and AdamW.

The reference takes all logits of the mini-batch in one forward pass; nothing of it is gradscope's arithmetic.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product

import pytest
import torch
from support.oracle import TrueFloat64, as_policy
from support.policies import PAD, Share, make_model, make_responses
from support.tiers import every
from torch import Tensor, nn

from gradscope.objective import (
    LossSettings,
    StepTokens,
    Updater,
    batch_statistics,
)
from gradscope.objective.shared_prompts import can_pack
from gradscope.policy import Policy, load_policy
from gradscope.rollouts import Response, TokenBatch, collate
from gradscope.runs import ALONE, Processes
from gradscope.sampling import HFSampler, batch_rows, rollout_rows
from gradscope.tasks import draw_questions, get_task
from gradscope.trainer import TrainConfig, get_preset
from gradscope.trainer.step import compute_advantages, plan_update

CPU = torch.device("cpu")
# Old log-probabilities lie about 0.1 off the policy's: clips this narrow are active on every side.
NARROW = {"clip_ratio_low": 0.05, "clip_ratio_high": 0.04, "clip_ratio_c": 1.1, "kl_coef": 0.2}
SETTINGS = LossSettings(**NARROW)
REWEIGHT = LossSettings(**NARROW, reweight_alpha=0.3)
SUMS = 1e-11
"""Relative to the norm of the whole: the same sums in float64, in another order."""


# ---- the reference


def make_rows(model: nn.Module) -> list[Response]:
    """Ten responses at two temperatures with an advantage per token: masks with holes, one that keeps nothing, prompts
    and responses of one token."""
    policy = as_policy(model)
    warm = make_responses(policy, temperature=0.7)
    cool = make_responses(policy, lengths=(1, 5, 6, 3), prompt_lengths=(1, 1, 2, 2), temperature=1.6, seed=1)
    cool[3] = replace(cool[3], response_mask=[False] * 3)
    rows = [*warm, *(replace(row, group=row.group + 3) for row in cool)]
    generator = torch.Generator().manual_seed(2)
    draws = [torch.randn(len(row.response_ids), generator=generator).tolist() for row in rows]
    return [replace(row, advantage=draw) for row, draw in zip(rows, draws, strict=True)]


def reference_loss(
    model: nn.Module, batch: TokenBatch, settings: LossSettings, num_tokens: int
) -> tuple[Tensor, Counter[str]]:
    """Eq. 1 (Eq. 4 with α), dual clip and all, of the tokens of response_mask; and how many each clip has removed.

    The batch is padded on the right, where causal attention does not look.
    """
    logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask.long(), use_cache=False).logits
    total, clips = torch.zeros((), dtype=torch.float64), Counter()
    for row, s in batch.response_mask.nonzero().tolist():
        logprob = torch.log_softmax(logits[row, s - 1].double() / batch.temperature[row], -1)[batch.input_ids[row, s]]
        old, ref = batch.old_logprobs[row, s].double(), batch.ref_logprobs[row, s].double()
        advantage = batch.advantages[row, s].double()
        if settings.reweight_alpha is not None:
            advantage = (settings.reweight_alpha * old.exp() + 1 - settings.reweight_alpha) * advantage
        ratio = (logprob - old).exp()
        edge = ratio.clamp(1 - settings.clip_ratio_low, 1 + settings.clip_ratio_high)
        surrogate = torch.minimum(ratio * advantage, edge * advantage)
        if settings.clip_ratio_c is not None and advantage < 0:
            surrogate = torch.maximum(surrogate, settings.clip_ratio_c * advantage)
            clips["dual"] += bool(ratio > settings.clip_ratio_c)
        clips["low"] += bool(advantage < 0 and ratio < 1 - settings.clip_ratio_low)
        clips["high"] += bool(advantage > 0 and ratio > 1 + settings.clip_ratio_high)
        total = total + surrogate - settings.kl_coef * ((ref - logprob).exp() - (ref - logprob) - 1)
    return -total / num_tokens, clips


def gradients(model: nn.Module, scalar: Tensor) -> list[Tensor | None]:
    return list(torch.autograd.grad(scalar, list(model.parameters()), allow_unused=True))


def flat(model: nn.Module, grads: list[Tensor | None]) -> Tensor:
    pairs = zip(model.parameters(), grads, strict=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for p, g in pairs]).double()


def own_gradient(updater: Updater, part: StepTokens, settings: LossSettings) -> tuple[Tensor, list[float]]:
    """What accumulate adds to .grad, flat, and what it returns."""
    updater.model.zero_grad()
    found = [*updater.accumulate(part, settings)[:4]]
    gradient = flat(updater.model, [p.grad for p in updater.model.parameters()])
    updater.model.zero_grad()
    return gradient, found


def assert_same(found: Tensor, expected: Tensor, tolerance: float = SUMS) -> None:
    """To that share of the norm of the whole."""
    assert expected.norm() > 0
    assert (found - expected).norm() <= tolerance * expected.norm()


def make_updater(model: nn.Module, size: int = 3, *, processes: Processes = ALONE, **settings) -> Updater:
    """AdamW as the trainer has it, with a rate that moves every probability."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    return Updater(model, optimizer, CPU, size, processes=processes, **settings)


@pytest.fixture(scope="module")
def start() -> nn.Module:
    """GPT-2, all of which is computed in float64; its head is its embedding."""
    return make_model("gpt2", dtype=torch.float64)


@pytest.fixture(scope="module")
def rows(start) -> list[Response]:
    return make_rows(start)


@pytest.fixture
def model(start) -> nn.Module:
    return copy.deepcopy(start)


@pytest.fixture
def batch(rows) -> TokenBatch:
    return collate(rows, pad_id=PAD)


# ---- the gradient


@pytest.mark.parametrize("name", every(2, ["gpt2", "llama", "qwen2", "gemma2", "mixtral", "opt"]))
def test_loss_gradient_and_clipped_tokens_are_those_of_the_whole_mini_batch_at_every_micro_batch_size(name):
    model = make_model(name, dtype=torch.float64)
    rows = make_rows(model)
    right, left = collate(rows, pad_id=PAD), collate(rows, pad_id=PAD, side="left")
    with TrueFloat64():
        loss, clips = reference_loss(model, right, SETTINGS, right.num_tokens)
        expected = flat(model, gradients(model, loss))
        assert min(clips.values()) >= 2
        for size in (1, 2, 3, len(rows)):
            for batch in (left, right) if size == 2 else (left,):
                gradient, found = own_gradient(
                    make_updater(model, size), StepTokens("all", batch, batch.num_tokens), SETTINGS
                )
                assert_same(gradient, expected)
                # The totals are summed in float32: over processes, on any device.
                assert found[0] == pytest.approx(loss.item(), rel=1e-6)
                assert found[1:] == [clips["low"], clips["high"], clips["dual"]]


METHODS = {
    "plain": {},
    "no dual clip, no KL": {"clip_ratio_c": None, "kl_coef": 0.0},
    "reweight": {"reweight_alpha": 0.3},
    "lopti": {"lopti_eta": 0.5},
    "lopti, high first": {"lopti_eta": 0.5, "lopti_order": "high-first"},
    "lopti, interleaved": {"lopti_eta": 0.3, "lopti_schedule": "interleaved"},
    "both": {"lopti_eta": 0.5, "reweight_alpha": 0.3},
    "masked": {"mask_probs": (0.25, 1.0)},
    "reinforce++": {"algorithm": "reinforce++"},
    "reinforce++ and both": {"algorithm": "reinforce++", "lopti_eta": 0.5, "reweight_alpha": 0.1},
}


FIRST = {name: METHODS[name] for name in ("plain", "reweight", "lopti", "lopti, high first", "masked", "both")}


@pytest.fixture(scope="module")
def recorded() -> tuple[Policy, TokenBatch]:
    """The embedded policy's responses to four puzzles, four each, and a reference that it has moved away from."""
    policy, config = load_policy("embedded", dtype="float32", device="cpu"), get_preset("kk-embedded")
    task = get_task(config.task)
    rows = rollout_rows(
        policy,
        draw_questions(task, 4, seed=0, people=(2, 3)),
        sampler=HFSampler(policy, progress=False),
        n=4,
        temperature=config.temperature,
        max_new_tokens=200,
        seed=0,
        task=task,
    )
    batch = batch_rows(rows)
    old = batch_statistics(policy.model, batch, micro_batch_size=8, device=CPU).logprob
    noise = torch.randn(old.shape, generator=torch.Generator().manual_seed(1))
    batch = replace(batch, ref_logprobs=old + 0.3 * noise, old_logprobs=old)
    return policy, replace(batch, advantages=compute_advantages(batch, TrainConfig()))


@pytest.mark.parametrize("method", every(2, FIRST))
def test_on_recorded_rollouts_the_first_steps_gradient_is_that_of_the_whole_padded_batch(recorded, method):
    policy, batch = recorded
    config = TrainConfig(kl_coef=0.05, **FIRST[method])
    assert can_pack(policy.model)
    part = plan_update(batch, config, torch.Generator().manual_seed(0)).steps[0]
    mine = make_updater(policy.model, 8)
    gradient, _ = own_gradient(mine, part, config.loss)
    loss, _ = reference_loss(policy.model, part.batch, config.loss, batch.num_tokens)
    expected = flat(policy.model, gradients(policy.model, loss))
    assert_same(gradient, expected, 1e-5)  # what is float32 rounds at 6e-8 in each of some twenty layers


@pytest.mark.parametrize("alpha", [None, 0.3])
@pytest.mark.parametrize("size", [1, 4, 10])
def test_a_step_that_finds_its_own_old_policy_is_the_one_that_was_scored_before(batch, alpha, size):
    model = make_model("gpt2", dtype=torch.float64, attention="sdpa")
    loss = LossSettings(kl_coef=0.05, reweight_alpha=alpha)
    with TrueFloat64():
        before = batch_statistics(model, batch, micro_batch_size=3, device=CPU)
        batch = replace(batch, ref_logprobs=before.logprob - 0.1, old_logprobs=before.logprob)
        unscored = replace(batch, old_logprobs=None)
        known, own = (StepTokens("all", given, given.num_tokens) for given in (batch, unscored))
        expected, totals = own_gradient(make_updater(model, size), known, loss)
        result = make_updater(model, size).accumulate(own, loss, score=True)
    assert_same(flat(model, [p.grad for p in model.parameters()]), expected)
    assert result[:4] == pytest.approx(totals, rel=1e-6)
    for name in ("logprob", "log_one_minus_prob", "entropy"):
        torch.testing.assert_close(getattr(result.statistics, name), getattr(before, name), rtol=1e-9, atol=1e-12)


def test_a_model_that_is_nan_is_said_by_the_statistics_and_takes_no_step(batch):
    model = make_model("llama", attention="sdpa")
    with torch.no_grad():
        model.lm_head.weight[0, 0] = torch.nan
    part = StepTokens("all", replace(batch, old_logprobs=None), batch.num_tokens)
    result = make_updater(model).step(part, SETTINGS, score=True)
    assert result.outcome == "nonfinite" and result.statistics.logprob[batch.response_mask].isnan().all()


@pytest.mark.parametrize("size", [1, 2, 5, 10])
def test_gradients_averaged_over_processes_are_those_of_one_process(model, batch, size):
    part = StepTokens("all", batch, batch.num_tokens)
    expected, totals = own_gradient(make_updater(model, size), part, SETTINGS)
    shares = [own_gradient(make_updater(model, size, processes=Share(r, 3)), part, SETTINGS) for r in range(3)]
    assert_same(sum(gradient for gradient, _ in shares) / 3, expected)
    assert torch.tensor([t for _, t in shares]).sum(0).tolist() == pytest.approx(totals, rel=1e-6)


# ---- the step


@pytest.mark.parametrize("max_grad_norm", [0.05, 1e3, None])
def test_steps_are_clip_grad_norm_and_adamw_on_the_reference_gradient(model, batch, max_grad_norm):
    config = TrainConfig(**NARROW, lopti_eta=0.5, mini_batch_size=5)
    steps = plan_update(batch, config, torch.Generator()).steps
    other = copy.deepcopy(model)
    updater = make_updater(model, max_grad_norm=max_grad_norm)
    optimizer = torch.optim.AdamW(other.parameters(), lr=1e-3, weight_decay=0.01)
    before = flat(model, list(model.parameters())).clone()
    for part in steps:  # each step starts from moments that the last one left
        loss, clips = reference_loss(other, part.batch, SETTINGS, part.num_tokens)
        for parameter, gradient in zip(other.parameters(), gradients(other, loss), strict=True):
            parameter.grad = gradient
        norm = nn.utils.clip_grad_norm_(other.parameters(), math.inf if max_grad_norm is None else max_grad_norm)
        clipped = flat(other, [p.grad for p in other.parameters()]).norm().item()
        optimizer.step()
        result = updater.step(part, SETTINGS)
        assert (result.name, result.outcome, result.num_tokens) == (part.name, "taken", part.batch.num_tokens)
        assert result.loss == pytest.approx(loss.item(), rel=1e-6)
        assert result.grad_norm == pytest.approx(norm.item(), rel=1e-10)
        assert result.grad_norm_clipped == pytest.approx(clipped, rel=1e-10)
        assert (result.clipped_low, result.clipped_high, result.clipped_dual) == (
            clips["low"],
            clips["high"],
            clips["dual"],
        )
        if max_grad_norm == 0.05:
            assert result.grad_norm_clipped == pytest.approx(0.05, rel=1e-4) != result.grad_norm
        else:
            assert result.grad_norm_clipped == result.grad_norm
        ours, theirs = (flat(m, list(m.parameters())) for m in (model, other))
        # A gradient is the same to 1e-11 of its norm, and AdamW divides by as little as 1e-8.
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)
        assert all(p.grad is None for p in model.parameters())
    assert (flat(model, list(model.parameters())) - before).abs().max() > 3e-3  # four steps of 1e-3


def copy_of(updater: Updater) -> list[Tensor]:
    """Parameters and the optimizer's state."""
    state = [value for entry in updater.optimizer.state.values() for value in entry.values()]
    return [tensor.detach().clone() for tensor in (*updater.model.parameters(), *state)]


def assert_untouched(updater: Updater, before: list[Tensor]) -> None:
    after = copy_of(updater)
    assert len(after) == len(before) > 3 * len(list(updater.model.parameters())) - 1  # moments and step counts
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    assert all(p.grad is None for p in updater.model.parameters())


@contextmanager
def broken(model: nn.Module, kind: str, call: int) -> Iterator[None]:
    """Break that forward pass (0, 1, …) or its gradient: NaN logits, or a NaN or infinity in one parameter's .grad."""
    calls: list[int] = []

    def spoil(_module: nn.Module, _args, output):
        calls.append(1)
        if kind == "nan logits" and len(calls) == call + 1:
            output.logits = output.logits * math.nan
        return output

    def spoil_gradient(gradient: Tensor) -> Tensor:
        bad = {"nan gradient": math.nan, "infinite gradient": math.inf}.get(kind, 0.0)
        return gradient + bad if len(calls) == call + 1 else gradient

    handles = [model.register_forward_hook(spoil), model.transformer.ln_f.weight.register_hook(spoil_gradient)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize(
    ("kind", "call"), every(4, product(["nan logits", "nan gradient", "infinite gradient"], [0, 1, 3]))
)
def test_a_gradient_that_is_not_finite_in_one_micro_batch_moves_neither_weights_nor_moments(model, batch, kind, call):
    part = StepTokens("all", batch, batch.num_tokens)
    updater = make_updater(model)
    good = updater.step(part, SETTINGS)
    before = copy_of(updater)
    with broken(model, kind, call):
        result = updater.step(part, SETTINGS)
    reached = call < 3  # of three micro-batches
    assert result.outcome == ("nonfinite" if reached else "taken")
    if reached:
        assert_untouched(updater, before)
        assert not math.isfinite(result.grad_norm)
        assert math.isnan(result.grad_norm_clipped)
        assert math.isfinite(result.loss) == (kind != "nan logits")
        assert result.num_tokens == good.num_tokens
        assert updater.step(part, SETTINGS).outcome == "taken"  # and the next one is as if nothing had been


def test_an_empty_pass_runs_nothing_and_takes_no_step(model, batch):
    updater = make_updater(model)
    updater.step(StepTokens("all", batch, batch.num_tokens), SETTINGS)
    before = copy_of(updater)
    empty = replace(batch, response_mask=torch.zeros_like(batch.response_mask))
    for num_tokens in (batch.num_tokens, 0):
        with broken(model, "nan logits", 0):
            result = updater.step(StepTokens("low", empty, num_tokens), SETTINGS, match=REWEIGHT)
        assert (result.name, result.outcome, result.loss, result.num_tokens) == ("low", "empty", 0.0, 0)
        assert math.isnan(result.grad_norm)
        assert math.isnan(result.grad_norm_clipped)
        assert_untouched(updater, before)


def test_a_matched_gradient_has_the_direction_of_plain_and_the_norm_of_reweight_before_it_is_clipped(model, batch):
    part = StepTokens("all", batch, batch.num_tokens)
    plain, reweighted = (
        flat(model, gradients(model, reference_loss(model, batch, settings, batch.num_tokens)[0]))
        for settings in (SETTINGS, REWEIGHT)
    )
    assert abs(plain.norm() / reweighted.norm() - 1) > 0.1
    for limit in (None, 0.1):
        trained = copy.deepcopy(model)
        updater = Updater(trained, torch.optim.SGD(trained.parameters(), lr=1.0), CPU, 3, max_grad_norm=limit)
        result = updater.step(part, SETTINGS, match=REWEIGHT)
        moved = flat(model, list(model.parameters())) - flat(trained, list(trained.parameters()))
        size = reweighted.norm().item() if limit is None else limit * reweighted.norm() / (reweighted.norm() + 1e-6)
        assert_same(moved, plain * (size / plain.norm()), 1e-10)
        assert result.outcome == "taken"
        assert result.grad_norm == pytest.approx(reweighted.norm().item(), rel=1e-10)
        assert result.grad_norm_clipped == pytest.approx(float(size), rel=1e-10)


def test_a_gradient_of_zero_is_a_step_of_weight_decay_matched_or_not(model, batch):
    nothing = replace(batch, advantages=torch.zeros_like(batch.advantages))
    part = StepTokens("all", nothing, batch.num_tokens)
    off = replace(SETTINGS, kl_coef=0)
    for match in (None, replace(off, reweight_alpha=0.3)):
        before = flat(model, list(model.parameters())).clone()
        result = make_updater(model).step(part, off, match=match)
        assert (result.outcome, result.loss, result.grad_norm, result.grad_norm_clipped) == ("taken", 0, 0, 0)
        torch.testing.assert_close(flat(model, list(model.parameters())), before * (1 - 1e-5), rtol=1e-15, atol=0)
