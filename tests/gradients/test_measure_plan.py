"""A plan of a measurement: counts that the table will have, no weights, no files, and what it prints."""

import itertools

import pytest
import torch
from support.decoders import COMMON, SANDWICHED
from support.policies import (
    CAUSAL,
    RULED,
    UNRULED,
    make_batch,
    make_policy,
    make_responses,
    save_checkpoint,
    write_jsonl,
)

from gradscope.gradients import MeasureSettings, Rates, measure, outline_policy, plan_batch
from gradscope.gradients.cost import pilot
from gradscope.gradients.cost.plan import follows_rules
from gradscope.rollouts import read_rollouts

PARTS = ("preparation", "forward", "head", "factors", "backward", "norms")
RATES = Rates("a machine", dict.fromkeys(PARTS, 1e9))


@pytest.fixture(scope="module")
def policy():
    return make_policy("llama")


@pytest.fixture(scope="module")
def batch(policy):
    return make_batch(policy)


@pytest.mark.parametrize("each", [None, 2])
def test_a_plan_counts_the_tokens_that_the_table_will_have_measured(policy, batch, each):
    settings = MeasureSettings(tokens_per_interval=each, self_check=False)
    plan = plan_batch(policy, batch, settings, rates=RATES)
    table = measure(policy, batch, tokens_per_interval=each, self_check=False)
    assert (plan.responses, plan.tokens) == (len(batch), len(table))
    if each is None:
        assert plan.measured == table["param_grad_norm"].notna().sum()
        prompts = (batch.response_start - batch.attention_mask.int().argmax(1)).numpy()
        assert plan.mean_prefix == pytest.approx((table["position"] + prompts[table["response"]]).mean())
    else:
        assert plan.measured <= 4 * each


MISTAKEN = {"granite_embedding", "granite_residual", "smollm3_without_angles", "helium", "ernie4_5"}
"""Blocks of a common decoder's modules that compute something else: a plan cannot see it, and says "if"."""


@pytest.mark.parametrize("name", [*CAUSAL, *RULED, *UNRULED])
def test_the_blocks_that_the_engine_has_rules_for_are_known_without_weights(name):
    ruled = {*COMMON, *SANDWICHED, *RULED}
    assert follows_rules(make_policy(name)) == (name in ruled | MISTAKEN)


@pytest.mark.parametrize(
    ("name", "dtype", "fast", "wanted", "speed"),
    [
        ("llama", None, False, "float32", 0.4 * 67e12),
        ("llama", "bfloat16", False, "float32", 0.4 * 67e12),
        ("llama", "float32", True, "tf32", 0.1 * 494e12),
        ("llama", None, True, "bfloat16", 0.04 * 989e12),
        ("gpt2", None, False, "bfloat16", 0.4 * 989e12),
        ("gpt2", "float32", False, "float32", 0.4 * 67e12),
    ],
)
def test_products_on_a_gpu_are_counted_in_the_precision_that_they_are_made_in(name, dtype, fast, wanted, speed):
    policy = make_policy(name)
    plan = plan_batch(policy, make_batch(policy), MeasureSettings(fast=fast), dtype=dtype, machine="h200")
    assert {plan.rates.by_part[part] for part in PARTS} == {speed}
    assert f"with products in {wanted}" in str(plan)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
@pytest.mark.parametrize("blocks", ["all", "two"])
def test_a_pilot_finds_a_rate_for_every_part_of_the_job(name, blocks, monkeypatch):
    policy = make_policy(name)
    if blocks == "two":
        monkeypatch.setattr(pilot, "SMALL", 0)
    monkeypatch.setattr(pilot, "SECONDS", 0.01)
    before = torch.random.get_rng_state()
    plan = plan_batch(policy, make_batch(policy), MeasureSettings(tokens_per_interval=2))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert set(plan.seconds) == set(PARTS) == set(plan.rates.by_part)
    assert all(0 < seconds < 60 for seconds in plan.seconds.values())
    assert f"{len(policy.blocks) if blocks == 'all' else 2} of its blocks" in plan.rates.machine


def test_a_pilots_seconds_are_those_of_its_clock(policy, batch, monkeypatch):
    """A clock that counts its looks: 1 s between two, so that rates are FLOPs over counted seconds."""
    looks = itertools.count()
    monkeypatch.setattr(pilot, "perf_counter", lambda: float(next(looks)))
    monkeypatch.setattr(pilot, "FIRST", 1e15)  # all tokens at once
    plan = plan_batch(policy, batch, MeasureSettings(self_check=False))
    engine = plan.flops["head"] + plan.flops["factors"] + plan.flops["backward"] + plan.flops["norms"]
    assert plan.rates.by_part["backward"] == pytest.approx(engine)
    assert sum(plan.seconds[part] for part in PARTS[2:]) == pytest.approx(1.0)
    assert plan.seconds["preparation"] + plan.seconds["forward"] == pytest.approx(1.0)


def test_a_policy_is_outlined_without_memory_for_a_weight(tmp_path):
    folder = save_checkpoint(tmp_path / "llama", "llama")
    for file in folder.glob("*.safetensors"):
        file.unlink()
    policy = outline_policy(str(folder))
    assert {parameter.device.type for parameter in policy.model.parameters()} == {"meta"}
    assert policy.tokenizer is not None


def test_the_printed_parts_add_up_and_name_what_was_assumed(tmp_path):
    folder = save_checkpoint(tmp_path / "gpt2", "gpt2")
    names = ("prompt_ids", "response_ids", "group", "reward")
    rows = [{n: getattr(r, n) for n in names} for r in make_responses(make_policy("gpt2"))]
    rollouts = write_jsonl(tmp_path / "rollouts.jsonl", rows)
    policy = outline_policy(str(folder))
    plan = plan_batch(policy, read_rollouts(rollouts, policy), MeasureSettings(tokens_per_interval=3), machine="h200")
    assert not plan.rules and plan.measured <= 12
    text = str(plan)
    _, work, memory = text.split("\n\n")
    rows = {line[:16].strip(): line[16:].split() for line in work.splitlines()}
    flops, seconds = zip(*(map(float, rows[name]) for name in plan.flops), strict=True)
    # Three digits each.
    assert [sum(flops), sum(seconds)] == pytest.approx([float(number) for number in rows["total"]], rel=0.01)
    assert sum(plan.seconds.values()) == pytest.approx(sum(seconds), rel=0.01)
    rows = {line[:16].strip(): line[16:].split() for line in memory.splitlines()}
    assert float(rows["total"][0]) == pytest.approx(sum(plan.memory["head"].values()) / 2**20, abs=0.006)
    for words in ("the model's own graph", "is not known without old_logprobs", "NVIDIA H200", "assumed 40%"):
        assert words in text
