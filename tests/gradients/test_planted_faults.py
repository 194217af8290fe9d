"""Faults planted in every block and every module are found before a number is written, however light the check is."""

from __future__ import annotations

from contextlib import suppress
from functools import cache

import numpy as np
import pytest
import torch
from support.oracle import brute_force
from support.policies import LAYERS, make_batch, make_policy
from support.tiers import every

from gradscope.errors import SelfCheckError
from gradscope.gradients import MeasureSettings, TableMeasurement, TokenGradientMeter, checked_tokens, measure
from gradscope.gradients.engine.decoder.block import BlockBackward
from gradscope.policy import Policy
from gradscope.rollouts import TokenBatch

DECODER = "llama_biases_tied"
"""Biases everywhere, and a table that is embedding and head."""


@cache
def policy(name: str) -> Policy:
    return make_policy(name, sharpness=5.0)


@cache
def batch(name: str) -> TokenBatch:
    return make_batch(policy(name))


def modules(name: str) -> list[str]:
    """That own parameters; of two with one table the first."""
    seen: set[int] = set()
    found = []
    for owner, module in policy(name).model.named_modules():
        own = [p for p in module.parameters(recurse=False) if id(p) not in seen]
        seen |= set(map(id, own))
        found += [owner] if own else []
    return found


def enter(name: str) -> TableMeasurement:
    with TableMeasurement(policy(name), batch(name), MeasureSettings()) as measurement:
        return measurement


@pytest.fixture
def light(monkeypatch) -> None:
    """One token of each interval is checked, as of a large policy, not two, as of a small one."""
    monkeypatch.setattr(checked_tokens, "LIGHT", 0)


# A rule that is wrong for one module of one block.


def plant_norm(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    """The module's norm is off by a hundredth of the whole gradient's, and so are all parameters'."""
    right = TokenGradientMeter.measure_together

    def wrong(self, sequences):
        found = right(self, sequences)
        for gradients in found:
            whole, norms = gradients.param_grad_norm, gradients.module_grad_norm
            before = norms.get(module, torch.zeros_like(whole))
            norms[module] = before + 0.01 * whole
            whole.copy_((whole.square() - before.square() + norms[module].square()).sqrt())
        return found

    monkeypatch.setattr(TokenGradientMeter, "measure_together", wrong)


@pytest.mark.parametrize(
    ("name", "module"), every(6, ((name, module) for name in (DECODER, "gpt2", "mixtral") for module in modules(name)))
)
def test_a_wrong_norm_of_any_module_is_found_and_the_module_named(name, module, monkeypatch, light):
    plant_norm(monkeypatch, module)
    with pytest.raises(SelfCheckError, match=rf"module {module.replace('.', '[.]')} differs"):
        enter(name)


@pytest.mark.parametrize("module", modules(DECODER))
def test_a_wrong_norm_of_any_module_is_found_by_the_check_of_a_small_policy(module, monkeypatch):
    plant_norm(monkeypatch, module)
    with pytest.raises(SelfCheckError, match=rf"module {module.replace('.', '[.]')} differs"):
        enter(DECODER)


def test_without_the_check_the_wrong_norm_would_be_written(monkeypatch):
    right = measure(policy(DECODER), batch(DECODER), self_check=False)
    plant_norm(monkeypatch, "model.norm")
    wrong = measure(policy(DECODER), batch(DECODER), self_check=False)
    assert (wrong["param_grad_norm"] > right["param_grad_norm"]).all()


# A backward pass that is wrong in one block.


def block_parts() -> list[tuple[int, str]]:
    parts = [f"self_attn.{role}_proj" for role in "qkvo"] + [f"mlp.{role}_proj" for role in ("gate", "up", "down")]
    parts += ["input_layernorm", "post_attention_layernorm"]
    head = ("self_attn.o_proj", *(p for p in parts if p.startswith("mlp")), "post_attention_layernorm")
    # What of the last block is the head's has no rule of the block's.
    return [(b, part) for b in range(LAYERS) for part in parts if b < LAYERS - 1 or part not in head]


def plant_in_block(monkeypatch: pytest.MonkeyPatch, block: int, part: str | None) -> None:
    """The squared norm of a part of the block is off by a tenth of the largest; None: what flows back through it is."""
    for method in ("through_block", "through_attention_at"):
        right = getattr(BlockBackward, method)

        def wrong(self, *args, right=right):
            delta = right(self, *args)
            if self.block.name != f"model.layers.{block}":
                return delta
            if part is None:
                return 1.01 * delta
            self.squares[f"{self.block.name}.{part}"] += 0.1 * torch.stack(list(self.squares.values())).amax(0)
            return delta

        monkeypatch.setattr(BlockBackward, method, wrong)


@pytest.mark.parametrize(("block", "part"), every(4, [*block_parts(), *((block, None) for block in range(LAYERS))]))
def test_a_wrong_rule_in_any_block_sends_the_policy_along_its_graph(block, part, monkeypatch):
    assert enter(DECODER).meter.decoder is not None
    plant_in_block(monkeypatch, block, part)
    assert enter(DECODER).meter.decoder is None


@pytest.mark.parametrize(("block", "part"), every(2, [*block_parts(), *((block, None) for block in range(LAYERS))]))
def test_a_rule_that_the_trial_passes_is_found_by_the_self_check(block, part, monkeypatch, light):
    monkeypatch.setattr(TokenGradientMeter, "_rules_hold", lambda *_: True)
    plant_in_block(monkeypatch, block, part)
    with pytest.raises(SelfCheckError):
        enter(DECODER)


# A model whose backward pass is not that of its modules.


def with_parts(name: str) -> list[str]:
    """Modules that something flows back through."""
    return [module for module in modules(name) if "embed" not in module]


@pytest.mark.parametrize("module", every(2, with_parts(DECODER)))
def test_a_hook_on_any_module_that_changes_the_backward_pass_is_found_or_followed(module, light):
    ids, targets = batch(DECODER).sequence(0)
    without = brute_force(policy(DECODER), ids, targets).parameters
    target = policy(DECODER).model.get_submodule(module)
    handle = target.register_full_backward_hook(lambda _module, into, _out: tuple(1.1 * g for g in into))
    try:
        truth = brute_force(policy(DECODER), ids, targets).parameters
        assert (truth / without - 1).abs().max() > 1e-3
        with suppress(SelfCheckError), TableMeasurement(policy(DECODER), batch(DECODER), MeasureSettings()) as found:
            group = next(group for group in found.groups if 0 in group)
            table = dict(zip(group, found.measure_responses(group), strict=True))[0]
            np.testing.assert_allclose(table["param_grad_norm"], truth, rtol=1e-3)
    finally:
        handle.remove()


# Neighbours and companions.


def test_a_fault_that_shows_only_beside_another_token_is_found(monkeypatch, light):
    monkeypatch.setattr(TokenGradientMeter, "_rules_hold", lambda *_: True)
    right = BlockBackward.through_block
    monkeypatch.setattr(
        BlockBackward, "through_block", lambda self, delta: right(self, delta).mean(2, keepdim=True).expand_as(delta)
    )
    with pytest.raises(SelfCheckError):
        enter(DECODER)


def test_a_fault_that_shows_only_beside_another_sequence_fails_the_trial(monkeypatch):
    right = BlockBackward.through_block

    def wrong(self, delta):
        back = right(self, delta)
        return back.mean(0, keepdim=True).expand_as(back).contiguous()

    monkeypatch.setattr(BlockBackward, "through_block", wrong)
    assert enter(DECODER).meter.decoder is None


def test_a_light_check_has_a_token_of_every_interval_and_no_more(monkeypatch):
    monkeypatch.setattr(checked_tokens, "LIGHT", 0)
    with TableMeasurement(policy(DECODER), batch(DECODER), MeasureSettings()) as measurement:
        intervals = set(measurement.statistics.intervals.tolist())
        assert len(intervals) > 2 and measurement.check.tokens == len(intervals)


def test_how_light_the_check_is_changes_no_token_that_is_measured(monkeypatch):
    tables = []
    for light in (checked_tokens.LIGHT, 0):
        monkeypatch.setattr(checked_tokens, "LIGHT", light)
        tables.append(measure(policy(DECODER), batch(DECODER), tokens_per_interval=2))
    assert tables[0].equals(tables[1])
