"""A plan of a measurement: counts that the table will have, no weights, no files, and what it prints."""

import numpy as np
import pytest
import torch
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

from analyses.measure.cost_growth import gpu_table
from gradscope.errors import InputError
from gradscope.gradients import MeasureSettings, Speeds, gpu_speeds, measure, outline_policy, plan_batch
from gradscope.gradients.cost import plan as measure_plan
from gradscope.gradients.cost.measuring import GRAPH
from gradscope.gradients.cost.plan import choose_tokens, follows_rules
from gradscope.gradients.engine.products import PRODUCTS
from gradscope.rollouts import read_rollouts

SPEEDS = Speeds("a machine", 1e9, 1e9, 1e9, 1e9, 1e9, 1e-6)


@pytest.fixture(scope="module")
def policy():
    return make_policy("llama")


@pytest.fixture(scope="module")
def batch(policy):
    return make_batch(policy)


@pytest.mark.parametrize("each", [None, 2])
def test_a_plan_counts_the_tokens_that_the_table_will_have_measured(policy, batch, each):
    settings = MeasureSettings(tokens_per_interval=each, self_check=False)
    plan = plan_batch(policy, batch, settings, speeds=SPEEDS)
    table = measure(policy, batch, tokens_per_interval=each, self_check=False)
    assert (plan.responses, plan.tokens) == (len(batch), len(table))
    if each is None:
        assert plan.measured == table["param_grad_norm"].notna().sum()
        prompts = (batch.response_start - batch.attention_mask.int().argmax(1)).numpy()
        assert plan.mean_prefix == pytest.approx((table["position"] + prompts[table["response"]]).mean())
    else:
        assert plan.measured <= 4 * each


def test_a_sample_has_as_many_tokens_of_each_interval_of_pi_old_as_are_asked_for(batch):
    chosen, words = choose_tokens(batch, MeasureSettings(tokens_per_interval=2))
    prob = batch.old_logprobs[batch.response_mask].exp().numpy()
    counts = np.bincount(np.minimum((4 * prob).astype(int), 3), minlength=4)
    drawn = np.bincount(np.minimum((4 * prob[chosen]).astype(int), 3), minlength=4)
    assert drawn.tolist() == np.minimum(counts, 2).tolist()
    assert "π_old" in words


MISTAKEN = {"granite_embedding", "granite_residual", "smollm3_without_angles", "helium", "ernie4_5"}
"""Blocks of a common decoder's modules that compute something else: a plan cannot see it, and says "if"."""


@pytest.mark.parametrize("name", [*CAUSAL, *RULED, *UNRULED])
def test_the_blocks_that_the_engine_has_rules_for_are_known_without_weights(name):
    ruled = {"qwen2", "llama", "qwen3", *RULED}
    assert follows_rules(make_policy(name)) == (name in ruled | MISTAKEN)


@pytest.mark.parametrize(
    ("name", "dtype", "fast", "wanted"),
    [
        ("llama", None, False, "float32"),
        ("llama", "bfloat16", False, "float32"),
        ("llama", "float32", True, "tf32"),
        ("llama", None, True, "bfloat16"),
        ("gpt2", None, False, "bfloat16"),
        ("gpt2", "float32", False, "float32"),
    ],
)
def test_products_on_a_gpu_are_counted_in_the_precision_that_they_are_made_in(name, dtype, fast, wanted):
    policy = make_policy(name)
    plan = plan_batch(policy, make_batch(policy), MeasureSettings(fast=fast), dtype=dtype, machine="h200")
    assert plan.speeds == gpu_speeds("h200", wanted)
    assert f"with products in {wanted}" in str(plan)


@pytest.mark.parametrize(
    ("dtype", "fast", "arrays", "product"),
    [
        (None, False, torch.float32, "exact"),
        (None, True, torch.float32, "bfloat16"),
        ("bfloat16", False, torch.float32, "exact"),
        ("float64", False, torch.float64, "exact"),
    ],
)
def test_this_machine_is_measured_with_the_products_that_the_engine_will_make(
    policy, batch, monkeypatch, dtype, fast, arrays, product
):
    asked = {}
    monkeypatch.setattr(measure_plan, "measure_speeds", lambda sizes, **how: asked.update(how) or SPEEDS)
    plan_batch(policy, batch, MeasureSettings(fast=fast), dtype=dtype, device="cpu")
    assert (asked["dtype"], asked["multiply"]) == (arrays, PRODUCTS[product])


def test_a_fast_mode_that_measure_would_refuse_is_refused(policy, batch):
    with pytest.raises(InputError, match="the policy is float64 and the fast mode"):
        plan_batch(policy, batch, MeasureSettings(fast=True), dtype="float64", device="cpu", speeds=SPEEDS)
    other = make_policy("gpt2")
    with pytest.raises(InputError, match="GPT2LMHeadModel is not built of blocks that the fast mode knows"):
        plan_batch(other, make_batch(other), MeasureSettings(fast=True), speeds=SPEEDS)


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
    assert plan.engine is GRAPH and plan.measured <= 12
    text = str(plan)
    _, work, memory = text.split("\n\n")
    rows = {line[:16].strip(): line[16:].split() for line in work.splitlines()}
    flops, seconds = zip(*(map(float, rows[name]) for name in plan.work), strict=True)
    # Three digits each.
    assert [sum(flops), sum(seconds)] == pytest.approx([float(number) for number in rows["total"]], rel=0.01)
    assert sum(plan.seconds.values()) == pytest.approx(sum(seconds), rel=0.01)
    rows = {line[:16].strip(): line[16:].split() for line in memory.splitlines()}
    assert float(rows["total"][0]) == pytest.approx(sum(plan.memory["head"].values()) / 2**20, abs=0.006)
    for words in ("the model's own graph", "is not known without old_logprobs", "NVIDIA H200", "assumed 60%"):
        assert words in text


def test_what_measure_would_refuse_is_refused_by_its_plan(policy, batch):
    with pytest.raises(InputError, match="tokens_per_interval is 0"):
        plan_batch(policy, batch, MeasureSettings(tokens_per_interval=0), speeds=SPEEDS)
    for cut in ({"chunk_rows": 0}, {"chunk_memory": -1}):
        with pytest.raises(InputError, match=r"chunk_\w+ is (0|-1); give 1 or more"):
            plan_batch(policy, batch, MeasureSettings(), speeds=SPEEDS, **cut)
    with pytest.raises(InputError, match="no GPU is known as"):
        plan_batch(policy, batch, MeasureSettings(), machine="abacus")


def test_large_policies_cost_more_on_a_gpu_and_long_sequences_too():
    table = gpu_table().query("products_in == 'bfloat16'")
    by_size = table.pivot(index="policy", columns="length", values="ms_per_token")
    assert by_size.index.tolist() == ["Qwen2.5-0.5B", "Qwen2.5-3B", "Qwen2.5-7B"]
    assert (np.diff(by_size.to_numpy(), axis=0) > 0).all() and (np.diff(by_size.to_numpy(), axis=1) > 0).all()
