"""Token norms in AdamW's metric: against token gradients by one autograd call each, on every way through the engine."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from support import handmade
from support.adapters import save_adapter
from support.gradients import flat_gradient, snapshot, token_gradients
from support.oracle import as_policy
from support.policies import make_batch, make_policy, save_checkpoint
from support.refusals import refused
from support.steps import warm_state
from support.tiers import every

from gradscope.diagnosis import DiagnosisSettings, diagnose
from gradscope.errors import SelfCheckError
from gradscope.gradients import ADAMW, PARAMETERS, Resources, TokenGradientMeter, measure, measuring
from gradscope.gradients.engine.metric import AT_ONCE, Metric
from gradscope.policy import AdamWState, Policy, float_parameters, load_policy

CLIP = 0.05


def expected(policy: Policy, jacobian: torch.Tensor, weight: np.ndarray, state: AdamWState) -> torch.Tensor:
    """‖g_t ⊘ (√v̂ + ε)‖, v̂ after the clipped step of all tokens, written out."""
    total = -(torch.tensor(weight, dtype=torch.float64)[:, None] * jacobian).sum(0) / len(jacobian)
    clipped = total * min(1.0, CLIP / (total.norm().item() + 1e-6))
    old = torch.cat([state.exp_avg_sq[name].flatten().double() for name, _ in float_parameters(policy.model)])
    steps = torch.cat([torch.full((p.numel(),), float(state.step[n])) for n, p in float_parameters(policy.model)])
    ((_, beta2), eps), *others = {(own.betas, own.eps) for own in state.settings.values()}
    assert not others
    corrected = (beta2 * old + (1 - beta2) * clipped**2) / (1 - beta2 ** (steps.double() + 1))
    return (jacobian / (corrected.sqrt() + eps)).norm(dim=1)


def state_of(policy: Policy, names: list[str] | None = None) -> AdamWState:
    return AdamWState.from_state_dict(policy.model, warm_state(policy, names), max_grad_norm=CLIP)


def check(policy: Policy, rel: float, **settings: object) -> None:
    batch, state = make_batch(policy, temperature=0.7), state_of(policy)
    before = snapshot(policy.model)
    table = measure(policy, batch, metric="adamw", optimizer_state=state, **settings)
    assert snapshot(policy.model) == before
    jacobian = token_gradients(policy, batch).double()
    wanted = expected(policy, jacobian, table["weight"].to_numpy(), state)
    np.testing.assert_allclose(table[ADAMW], wanted, rtol=rel)
    np.testing.assert_allclose(table[PARAMETERS], jacobian.norm(dim=1), rtol=rel)


@pytest.mark.parametrize(
    "name", every(2, ["qwen2", "qwen3", "llama", "gpt2", "gemma2", "gemma3", "mixtral", "qwen3_moe", "opt"])
)
def test_norms_are_those_of_the_scaled_gradients(name):
    check(make_policy(name, torch.float64), 1e-5)


@pytest.mark.all
def test_in_float32_and_in_small_chunks_too(monkeypatch):
    monkeypatch.setitem(AT_ONCE, "cpu", 100)  # a part of a token's gradient at a time
    check(make_policy("llama"), 1e-3, resources=Resources(activations=20_000))


@pytest.mark.parametrize("name", every(6, sorted(handmade.EXACT)))
def test_oddly_built_decoders_are_exact_too(name):
    policy = as_policy(handmade.make(name))
    generator = torch.Generator().manual_seed(1)
    ids, targets = torch.randint(handmade.VOCAB, (12,), generator=generator), torch.arange(4, 12)
    size = sum(p.numel() for _, p in float_parameters(policy.model))
    scale = torch.rand(size, generator=generator, dtype=torch.float64) + 0.1
    for parameter in policy.model.parameters():
        parameter.requires_grad_(True)
    with measuring(policy.model):
        meter = TokenGradientMeter(policy, ids)
        meter.use(metric=Metric(policy.model, scale))
        found = meter.measure(ids, targets, torch.arange(len(targets)), temperature=1.0)
    policy.model.eval()
    each = torch.log_softmax(policy.model(input_ids=ids[None]).logits[0], -1)
    wanted = [(flat_gradient(policy.model, each[t - 1, ids[t]]) * scale).norm().item() for t in targets.tolist()]
    np.testing.assert_allclose(found.scaled_grad_norm, wanted, rtol=1e-8)


def test_an_adapters_own_parameters_are_scaled(tmp_path):
    base = save_checkpoint(tmp_path / "base", "qwen2")
    adapter = save_adapter(tmp_path / "adapter", base, r=4, target_modules=["q_proj", "down_proj"])
    policy = load_policy(adapter, params="adapter", dtype="float64")
    named = dict(float_parameters(policy.model))
    batch, state = make_batch(policy, temperature=0.7), state_of(policy, list(named))
    table = measure(policy, batch, metric="adamw", optimizer_state=state)
    for parameter in policy.model.parameters():
        parameter.requires_grad_(True)
    every = token_gradients(policy, batch)
    sizes = [(name, p.numel()) for name, p in policy.model.named_parameters()]
    parts = dict(zip([name for name, _ in sizes], every.split([n for _, n in sizes], dim=1), strict=True))
    jacobian = torch.cat([parts[name] for name in named], dim=1)
    np.testing.assert_allclose(table[ADAMW], expected(policy, jacobian, table["weight"].to_numpy(), state), rtol=1e-5)


@pytest.mark.all
def test_tokens_that_are_not_measured_have_none_and_unknown_metrics_are_nan():
    policy = make_policy("qwen2")
    batch = make_batch(policy)
    table = measure(policy, batch, metric="adamw", optimizer_state=state_of(policy), tokens=torch.tensor([0, 3]))
    assert table[ADAMW].notna().to_numpy().nonzero()[0].tolist() == [0, 3]
    assert measure(policy, batch, metric="adamw")[ADAMW].isna().all()
    unknown = replace(batch, rewards=None, advantages=None)
    assert measure(policy, unknown, metric="adamw", optimizer_state=state_of(policy))[ADAMW].isna().all()
    assert ADAMW not in measure(policy, batch)


def test_the_self_check_sees_a_norm_that_is_wrong_in_the_metric_alone():
    policy, state = make_policy("llama"), state_of(make_policy("llama"))
    name, weight = "model.norm.weight", policy.model.model.norm.weight
    for other, second in state.exp_avg_sq.items():
        second.fill_(1e-12 if other == name else 1.0)  # where this weight is nearly all that counts
    act = lambda _block, _given, found: found * (1 + 3e-3 * (weight.sum() - weight.sum().detach()))  # noqa: E731
    policy.blocks[0].register_forward_hook(act)
    measure(policy, make_batch(policy))
    with refused(kind=SelfCheckError):
        measure(policy, make_batch(policy), metric="adamw", optimizer_state=state)


@pytest.mark.all
def test_a_diagnosis_has_the_energy_of_the_tables_norms_and_says_where_it_has_none():
    policy = make_policy("llama")
    batch, state = make_batch(policy), warm_state(policy)
    for held in state["state"].values():
        held["step"] = torch.tensor(7.0)
    brief = DiagnosisSettings(influence_tokens=None, actual_step=False, compare=False, resamples=20)
    found = [diagnose(policy, batch, settings=replace(brief, seed=seed), optimizer_state=state) for seed in (0, 1)]
    rows = [f.statistics.query("statistic == 'squared_share' and metric == 'adamw'") for f in found]
    shares = [row.reset_index(drop=True) for row in rows]
    np.testing.assert_array_equal(shares[0]["value"], shares[1]["value"])
    table = found[0].table
    squares = (table["weight"].astype(float) * table[ADAMW].astype(float)) ** 2
    wanted = [squares[table["interval"] == a].sum() / squares.sum() for a in range(4)]
    np.testing.assert_allclose(shares[0]["value"], wanted, rtol=1e-6)
    raw = table.drop(columns=ADAMW)
    without = diagnose(policy, batch, raw, settings=brief, optimizer_state=state)
    assert "adamw_energy" in without.left_out and "adamw_energy" not in found[0].left_out
