"""The self-check: silent where only rounding differs, loud, and with a name, where the engine is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import MethodType

import pytest
import torch
import torch.nn.functional as F
from support.oracle import brute_force
from support.policies import CAUSAL, LAYERS, make_batch, make_policy
from support.tiers import every
from torch import Tensor

from gradscope.errors import InputError, SelfCheckError
from gradscope.gradients import (
    MeasureSettings,
    TableMeasurement,
    TokenGradientMeter,
    check_engine,
    measure,
    measuring,
    table as token_table,
)
from gradscope.gradients.engine import (
    autograd,
    embeddings,
    head,
    meter as token_gradients,
    norms as rules,
)
from gradscope.gradients.engine.decoder import block as decoder_block
from gradscope.gradients.engine.results import TOLERANCES
from gradscope.gradients.engine.self_check import CheckedToken, _compare, measure_plainly
from gradscope.policy import Policy


def check(policy: Policy, **settings):
    """The check that a measurement of make_batch's responses begins with."""
    exact = settings.pop("exact", policy)
    with TableMeasurement(policy, make_batch(exact, **settings), MeasureSettings()) as measurement:
        return measurement.check


def failure(policy: Policy) -> str:
    with pytest.raises(SelfCheckError) as caught:
        check(policy)
    text = str(caught.value)
    assert "\n" not in text and "self-check failed" in text and "nothing was measured" in text
    return text


@pytest.mark.parametrize("name", every(2, CAUSAL))
def test_an_engine_that_is_right_is_far_below_the_tolerance_in_float32(name):
    found = check(make_policy(name, sharpness=14.0), temperature=0.7)
    assert found.tokens >= 4 and found.tolerance == 1e-3
    assert 0 < found.largest_difference < 1e-4  # 3e-5 was the largest seen


@pytest.mark.parametrize(("dtype", "seen"), [(torch.float64, 1e-5), (torch.bfloat16, 0.05), (torch.float16, 0.01)])
@pytest.mark.parametrize("name", every(2, ["qwen2", "gpt2", "mixtral"]))
def test_every_dtype_has_a_tolerance_that_rounding_keeps(name, dtype, seen):
    found = check(make_policy(name, dtype), exact=make_policy(name))
    assert found.largest_difference < seen < found.tolerance == TOLERANCES[dtype]


def test_a_gradient_that_float16_cannot_hold_is_not_blamed_on_the_architecture():
    batch = make_batch(make_policy("llama"), temperature=1e-6)
    batch = replace(batch, old_logprobs=None, ref_logprobs=None)
    with (
        pytest.raises(InputError, match=r"beyond float16's 65504 at temperature 1e-06, .* or --dtype bfloat16"),
        TableMeasurement(make_policy("llama", torch.float16), batch, MeasureSettings()),
    ):
        pass
    with TableMeasurement(make_policy("llama", torch.bfloat16), batch, MeasureSettings()) as measurement:
        assert measurement.check.tokens


def test_what_it_compares_with_is_brute_force_module_by_module():
    policy = make_policy("gpt2", torch.float64)
    ids, targets = make_batch(make_policy("gpt2")).sequence(2)
    truth = brute_force(policy, ids, targets, temperature=0.7)
    with measuring(policy.model):
        meter = TokenGradientMeter(policy, ids)
        for k in (0, len(targets) - 1):
            (plain,) = measure_plainly(meter, ids, targets[k : k + 1], temperature=0.7)
            assert plain.act_grad_norm == pytest.approx(truth.layers[k].tolist(), rel=1e-5)
            assert plain.param_grad_norm == pytest.approx(truth.parameters[k].item(), rel=1e-5)
            assert plain.module_grad_norm == pytest.approx({n: v[k].item() for n, v in truth.modules.items()}, rel=1e-5)


def replace_rule(monkeypatch: pytest.MonkeyPatch, name: str, replacement: Callable[..., Tensor]) -> None:
    """Everywhere that it is used."""
    users = [m for m in (head, embeddings, autograd, decoder_block, token_gradients) if hasattr(m, name)]
    assert users
    for module in users:
        monkeypatch.setattr(module, name, replacement)


@pytest.mark.parametrize(
    ("name", "rule", "blamed"),
    [
        ("llama", "linear_square_norms", "module model.layers."),
        ("llama", "outer_square_norms", "module "),
        ("gpt2", "embedding_square_norms", "module transformer.w"),
        ("llama", "diagonal_square_norms", "norm"),
    ],
)
def test_a_rule_that_is_wrong_by_one_percent_is_caught_and_its_module_named(monkeypatch, name, rule, blamed):
    right = getattr(rules, rule)
    # 1 % of the norm; a norm's weight has too small a part in the whole to be noticed by so little.
    factor = 1.02 if rule != "diagonal_square_norms" else 25.0
    replace_rule(monkeypatch, rule, lambda *args, **settings: factor * right(*args, **settings))
    assert blamed in failure(make_policy(name))


def test_a_tied_tables_missing_cross_term_is_caught(monkeypatch):
    policy = make_policy("qwen2")
    with torch.no_grad():  # a token that points against what it sees, so that both uses of its row agree
        policy.model.model.embed_tokens.weight.mul_(3)
    replace_rule(monkeypatch, "tied_cross_terms", lambda delta, *_: delta.new_zeros(len(delta), delta.shape[2]))
    assert "module model.embed_tokens" in failure(policy)


@pytest.mark.parametrize("layer", range(LAYERS + 1))
def test_a_layers_activations_that_are_wrong_by_one_percent_are_named(monkeypatch, layer):
    right = TokenGradientMeter.measure_together

    def wrong(self, sequences):
        found = right(self, sequences)
        for gradients in found:
            gradients.act_grad_norm[:, layer] *= 1.01
        return found

    monkeypatch.setattr(TokenGradientMeter, "measure_together", wrong)
    assert f"activations of layer {layer} differs" in failure(make_policy("llama"))


def test_a_weight_that_is_used_behind_its_modules_back_is_caught():
    policy = make_policy("llama")
    mlp = policy.model.model.layers[1].mlp

    def forward(self, x):
        hidden = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(hidden) + F.linear(hidden.roll(1, -1), self.down_proj.weight)

    mlp.forward = MethodType(forward, mlp)
    assert "module model.layers.1.mlp.down_proj" in failure(policy)


def test_a_mistake_that_shows_only_beside_another_token_is_caught(monkeypatch):
    right = rules.linear_square_norms

    def wrong(delta, *args, **settings):
        return right(delta.mean(2, keepdim=True).expand_as(delta), *args, **settings)

    replace_rule(monkeypatch, "linear_square_norms", wrong)
    failure(make_policy("llama"))


def test_some_tokens_of_every_interval_are_compared(monkeypatch):
    policy = make_policy("llama", sharpness=5.0)
    batch = make_batch(policy)
    seen = []

    def record(meter, sequences):
        seen.extend(sequences)
        return check_engine(meter, sequences)

    monkeypatch.setattr(token_table, "check_engine", record)
    table = measure(policy, batch)
    compared = [(tuple(s.ids.tolist()), int(s.targets[k])) for s in seen for k in s.measured]
    counts = dict.fromkeys(range(4), 0)
    for line in table.itertuples():
        ids, targets = batch.sequence(line.response)
        index = int((batch.positions()[line.response][batch.attention_mask[line.response]] == line.position).nonzero())
        assert index in targets
        counts[line.interval] += (tuple(ids.tolist()), index) in compared
    assert counts == {interval: min(2, (table["interval"] == interval).sum()) for interval in range(4)}


def test_a_norm_that_is_nan_fails_the_check_wherever_it_stands():
    oracle = CheckedToken([1.0, 1.0], {"a": 1.0, "b": 1.0}, 2.0**0.5)
    ours = replace(oracle, module_grad_norm={"a": 1.0, "b": float("nan")})
    assert max(_compare(ours, oracle).values()) == float("inf")
