"""The self-check: silent where only rounding differs, loud, and with a name, where the engine is wrong."""

from __future__ import annotations

import gc
from dataclasses import replace
from types import MethodType

import pytest
import torch
import torch.nn.functional as F
from support.gradients import snapshot
from support.oracle import brute_force
from support.policies import CAUSAL, make_batch, make_policy
from support.refusals import refused
from support.tiers import every

from gradscope.errors import SelfCheckError
from gradscope.gradients import (
    MeasureSettings,
    TableMeasurement,
    measuring,
)
from gradscope.gradients.engine.plain import TokenNorms, measure_plainly
from gradscope.gradients.engine.results import TOLERANCES
from gradscope.gradients.engine.self_check import _compare
from gradscope.policy import Policy


def check(policy: Policy, **settings):
    """The check that a measurement of make_batch's responses begins with."""
    exact = settings.pop("exact", policy)
    with TableMeasurement(policy, make_batch(exact, **settings), MeasureSettings()) as measurement:
        return measurement.check


@pytest.mark.parametrize("name", every(4, CAUSAL))
def test_an_engine_that_is_right_is_far_below_the_tolerance_in_float32(name):
    found = check(make_policy(name, sharpness=14.0), temperature=0.7)
    assert found.tokens >= 4 and found.tolerance == 1e-3
    assert 0 < found.largest_difference < 1e-4  # 3e-5 was the largest seen


@pytest.mark.parametrize(
    ("name", "dtype", "seen"),
    every(
        4,
        [
            (name, dtype, seen)
            for name in ("qwen2", "gpt2", "mixtral")
            for dtype, seen in ((torch.float64, 1e-5), (torch.bfloat16, 0.05), (torch.float16, 0.01))
        ],
    ),
)
def test_every_dtype_has_a_tolerance_that_rounding_keeps(name, dtype, seen):
    found = check(make_policy(name, dtype), exact=make_policy(name))
    assert found.largest_difference < seen < found.tolerance == TOLERANCES[dtype]


def test_a_gradient_that_float16_cannot_hold_is_not_blamed_on_the_architecture():
    batch = make_batch(make_policy("llama"), temperature=1e-6)
    batch = replace(batch, old_logprobs=None, ref_logprobs=None)
    with (
        refused("float16", "1e-06", "--dtype bfloat16"),
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
        for k in (0, len(targets) - 1):
            (plain,) = measure_plainly(policy.model, policy.blocks, ids, targets[k : k + 1], temperature=0.7)
            assert plain.act_grad_norm == pytest.approx(truth.layers[k].tolist(), rel=1e-5)
            assert plain.param_grad_norm == pytest.approx(truth.parameters[k].item(), rel=1e-5)
            assert plain.module_grad_norm == pytest.approx({n: v[k].item() for n, v in truth.modules.items()}, rel=1e-5)


def test_a_weight_that_is_used_behind_its_modules_back_is_caught():
    policy = make_policy("llama")
    mlp = policy.model.model.layers[1].mlp

    def forward(self, x):
        hidden = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(hidden) + F.linear(hidden.roll(1, -1), self.down_proj.weight)

    mlp.forward = MethodType(forward, mlp)
    before = snapshot(policy.model)["model"]
    with pytest.raises(SelfCheckError) as caught:
        check(policy)
    text = str(caught.value)
    assert "module model.layers.1.mlp.down_proj" in text and "\n" not in text and "nothing was measured" in text
    assert snapshot(policy.model)["model"] == before
    del caught  # with what the raising functions held
    gc.collect()
    assert snapshot(policy.model)["model"] == before


def test_a_norm_that_is_nan_fails_the_check_wherever_it_stands():
    oracle = TokenNorms([1.0, 1.0], {"a": 1.0, "b": 1.0}, 2.0**0.5)
    ours = replace(oracle, module_grad_norm={"a": 1.0, "b": float("nan")})
    assert max(_compare(ours, oracle).values()) == float("inf")
