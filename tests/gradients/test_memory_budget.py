"""Under a tiny memory budget, where vectors lie in scratch files and steps go in slices, the numbers stay the same."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch
from support.gradients import fail_in_the_last_pass, raising, snapshot
from support.policies import make_batch, make_policy
from support.processes import Command
from support.refusals import refused
from support.steps import NARROW, STEPS, assert_split_as, brute_force, split_step, warm_state
from support.tiers import every

from gradscope.diagnosis import DiagnosisSettings, diagnose
from gradscope.errors import InputError
from gradscope.gradients import Resources, TokenJacobian, vector_bytes
from gradscope.gradients.operator import forward_mode
from gradscope.policy import without_packing
from gradscope.runs import scratch, scratch_zeros
from gradscope.updates import (
    SGD,
    StepSettings,
    apply_update,
    influence,
    influence_cost,
    update_cost,
)

pytestmark = pytest.mark.usefixtures("undrawn")

SPAN = 1000
"""Numbers worked on at a time: a few of the tiny models' parameters, and parts of others."""


@pytest.fixture
def on_disk(monkeypatch, tmp_path) -> Iterator[list[Path]]:
    """Whatever would go to a file does, however small; the files that were made. Afterwards none may be left."""
    monkeypatch.setattr(scratch, "SMALL", 0)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    for name in ("policy.adamw", "gradients.operator.vectors", "updates.step_settings", "updates.optimizer_step"):
        monkeypatch.setattr(sys.modules[f"gradscope.{name}"], "PART", SPAN)
    made, make = [], torch.from_file

    def recorded(name: str, **keywords: object) -> torch.Tensor:
        made.append(Path(name))
        return make(name, **keywords)

    monkeypatch.setattr(torch, "from_file", recorded)
    yield made
    assert list(tmp_path.glob("gradscope-*")) == []


# ---- the same numbers


@pytest.mark.parametrize("step", every(2, STEPS))
def test_each_source_contributes_its_part_of_a_step_that_is_split_by_hand(on_disk, step):
    policy = make_policy("gpt2", torch.float64)
    batch = make_batch(policy, temperature=0.7)
    state = warm_state(policy) if step.optimizer == "adamw" else None
    result = influence(policy, batch, loss=NARROW, step=step, optimizer_state=state, resources=Resources(1))
    brute = brute_force(policy, batch, NARROW)
    assert_split_as(result, brute, split_step(policy, brute, step, state), 1e-10)
    assert len(on_disk) == 2 and result.method == "forward mode"  # the sources, and the mean entropy's gradient


@pytest.mark.parametrize("variant", every(2, ["lopti", "all"]))
@pytest.mark.parametrize("adapter", [False, True], ids=["whole", "some"])
@pytest.mark.parametrize("fresh", every(2, [False, True]), ids=["saved", "fresh"])
@pytest.mark.parametrize("step", [STEPS[1], STEPS[2]], ids=["sgd", "adamw"])
def test_a_step_in_slices_is_the_optimizers_bit_for_bit(on_disk, step, fresh, adapter, variant):
    policy = make_policy("llama")
    batch = make_batch(policy)
    names = [n for n, _ in policy.model.named_parameters() if not adapter or "mlp" in n]
    state = None if fresh or step.optimizer == "sgd" else warm_state(policy, names)
    keywords = {"loss": NARROW, "step": step, "optimizer_state": state}
    expected = apply_update(policy, batch, variant, **keywords)
    before = snapshot(policy.model)["model"]
    found = apply_update(policy, batch, variant, **keywords, resources=Resources(vector_bytes(policy.model)))
    assert snapshot(policy.model)["model"] == before
    for field in ("logprob", "log_one_minus_prob", "entropy"):
        assert torch.equal(getattr(found.after, field), getattr(expected.after, field))
    assert found.results == expected.results and found.update_norm == pytest.approx(expected.update_norm, rel=1e-12)
    assert on_disk


def test_sums_in_a_file_touch_nothing_of_the_models(on_disk):
    policy = make_policy("qwen2")  # tied
    batch = make_batch(policy)
    weights = torch.randn(3, batch.num_tokens, generator=torch.Generator().manual_seed(0))
    weights[1] = 0
    expected = TokenJacobian(policy, batch, Resources(1 << 40)).vjp(weights).rows
    for parameter in policy.model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
        parameter.register_post_accumulate_grad_hook(raising(AssertionError("somebody else's hook")))
    before = snapshot(policy.model)["model"]
    found = TokenJacobian(policy, batch, Resources(0)).vjp(weights).rows
    assert torch.equal(found, expected) and found[0].any() and not found[1].any() and on_disk
    assert snapshot(policy.model)["model"] == before


@pytest.mark.all
@pytest.mark.parametrize("part", ["influence", "apply_update"])
def test_no_file_is_left_when_the_call_raises(on_disk, part):
    policy = make_policy("gpt2")
    batch = make_batch(policy)
    before = snapshot(policy.model)["model"]
    function, size = {"influence": (influence, 1), "apply_update": (apply_update, vector_bytes(policy.model))}[part]
    fail_in_the_last_pass(policy.model, lambda: function(policy, batch, resources=Resources(size)))
    assert len(on_disk) > 1 and snapshot(policy.model)["model"] == before


def test_too_little_disk_is_one_line_before_anything_is_measured(on_disk, monkeypatch):
    policy = make_policy("gpt2")
    batch = make_batch(policy)
    usage = type("Usage", (), {"free": 5})
    monkeypatch.setattr(scratch.shutil, "disk_usage", lambda folder: usage)
    size = vector_bytes(policy.model)
    policy.model.register_forward_hook(raising(AssertionError("measured")))
    for call in (influence, apply_update):
        with refused("--gradient-memory"):
            call(policy, batch, resources=Resources(size))
    assert on_disk == []


def test_a_disk_that_is_full_after_all_is_an_error_and_not_a_crash(on_disk, monkeypatch):
    monkeypatch.setattr(os, "posix_fallocate", raising(OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(InputError):
        scratch_zeros(10, dtype=torch.float32)


# ---- diagnoses


@pytest.fixture(scope="module")
def diagnosed() -> tuple:
    policy = make_policy("gpt2", torch.float64)
    step = StepSettings("adamw", 1e-3, 0.1, betas=(0.8, 0.95), eps=1e-6)
    quick = DiagnosisSettings(loss=NARROW, resamples=20, compare=False, step=step)
    return policy, make_batch(policy), quick


@pytest.mark.all
def test_a_diagnosis_leaves_out_the_step_that_does_not_fit_and_says_what_it_wants(diagnosed, monkeypatch):
    policy, batch, settings = diagnosed
    state = warm_state(policy)
    size = vector_bytes(policy.model)
    whole = diagnose(policy, batch, settings=settings, optimizer_state=state)
    some = diagnose(policy, batch, settings=replace(settings, gradient_memory=size), optimizer_state=state)
    none = diagnose(policy, batch, settings=replace(settings, gradient_memory=size - 1), optimizer_state=state)
    for found in (some, none):
        pd.testing.assert_frame_equal(found.frames["influence"], whole.frames["influence"], rtol=1e-6)
    pd.testing.assert_frame_equal(some.frames["movement"], whole.frames["movement"])
    assert "movement" not in none.frames
    (note,) = (note for note in none.notes if "the actual step" in note)
    assert f"takes {size / 1e9:.3g} GB" in note and "--gradient-memory" in note and "--no-actual-step" in note


@pytest.mark.all
def test_weightings_of_large_policies_are_compared_on_demand_alone(diagnosed, monkeypatch):
    policy, batch, settings = diagnosed
    settings = replace(settings, influence_tokens=None, actual_step=False, compare=None)
    size = sum(p.numel() for p in policy.model.parameters())
    monkeypatch.setattr(sys.modules["gradscope.diagnosis.products.comparison"], "LARGE", size)
    found = diagnose(policy, batch, settings=settings)
    assert "weightings" not in found.rows and [*found.left_out] == ["comparison"]
    assert "large" in {note.kind for note in found.notes}
    assert diagnose(policy, batch, settings=replace(settings, compare=True)).frames["weightings"].size
    found = diagnose(policy, batch, settings=replace(settings, compare=False))
    assert "weightings" not in found.rows and not found.left_out


# ---- cost


def test_costs_count_the_passes_that_are_made(monkeypatch):
    """A forward pass through the model, a backward pass and a derivative, each counted where it happens: with a row per
    response, which is the cost at most."""
    policy = make_policy("gpt2")
    batch = make_batch(policy)
    counts = {"forward": 0, "backward": 0, "derivative": 0}
    forward_mode._load_rules()  # enters a level of its own, once per process

    def counted(name: str, make):
        def call(*arguments, **keywords):
            counts[name] += 1
            return make(*arguments, **keywords)

        return call

    monkeypatch.setattr(torch.autograd, "grad", counted("backward", torch.autograd.grad))
    monkeypatch.setattr(torch.Tensor, "backward", counted("backward", torch.Tensor.backward))
    monkeypatch.setattr(forward_mode, "dual_level", counted("derivative", forward_mode.dual_level))
    monkeypatch.setattr(forward_mode, "TANGENTS", 0)  # each direction by itself: the cost is at most that

    def count(_module, _args, given, _output):
        counts["forward"] += given["input_ids"].shape[0] / len(batch)

    handle = policy.model.register_forward_hook(count, with_kwargs=True)
    step = StepSettings("adamw", 1e-3, 0.1, betas=(0.8, 0.95), eps=1e-6)
    keywords = {"loss": NARROW, "step": step, "optimizer_state": warm_state(policy)}
    for resources in (None, Resources(vector_bytes(policy.model))):
        for function in (influence, apply_update):
            counts.update(dict.fromkeys(counts, 0))
            with without_packing():
                function(policy, batch, **keywords, resources=resources)
            # A derivative runs the model itself.
            total = counts["forward"] - counts["derivative"] + 2 * counts["backward"] + 3 * counts["derivative"]
            if function is influence:
                assert total == pytest.approx(influence_cost(step, NARROW))
            else:
                assert total == pytest.approx(update_cost())
    handle.remove()
    assert influence_cost(SGD) < influence_cost(step)


# ---- memory itself

GROWTH = """
import ctypes, re, sys, threading, time, torch
ctypes.CDLL(None).mallopt(-3, int(sys.argv[1]))  # M_MMAP_THRESHOLD: what is larger is given back when it is freed
from transformers import Qwen2Config, Qwen2ForCausalLM
from gradscope.rollouts.batch import Response, collate
from gradscope.gradients import Resources, vector_bytes
from gradscope.policy import Policy, find_blocks
from gradscope.updates import StepSettings, apply_update, influence

sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6, "vocab_size": 20000}
torch.manual_seed(0)
model = Qwen2ForCausalLM(Qwen2Config(**sizes, num_attention_heads=8, num_key_value_heads=2, tie_word_embeddings=True))
policy = Policy(model.eval(), None, find_blocks(model))
step = StepSettings("adamw", 1e-4)
generator = torch.Generator().manual_seed(0)
draw = lambda n: torch.randint(0, 20000, (n,), generator=generator).tolist()
rows = [Response(draw(4), draw(8), advantage=(-1.0) ** i, group=0) for i in range(4)]
batch = collate(rows)
probs = torch.linspace(0.01, 0.99, batch.num_tokens)
from dataclasses import replace
batch = replace(batch, old_logprobs=torch.zeros(batch.input_ids.shape).masked_scatter(batch.response_mask, probs.log()))

def anonymous():
    return 1024 * int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1])

peaks, calling, running = {}, "", True
def watch():
    while running:
        own = calling  # what a look under the earlier call finds is not the next one's
        peaks[own] = max(peaks.get(own, 0), anonymous())
        time.sleep(0.005)
threading.Thread(target=watch, daemon=True).start()
size = vector_bytes(model)
calls = {}
for name, intervals in (("few", 1), ("many", 3)):
    edges = tuple(i / intervals for i in range(intervals + 1))
    calls[name] = lambda edges=edges: influence(policy, batch, step=step, edges=edges, resources=Resources(1))
calls["step"] = lambda: apply_update(policy, batch, step=step, resources=Resources(size))
for name, call in calls.items():
    start, calling = anonymous(), name
    call()
    print(name, (max(peaks.get(name, 0), anonymous()) - start) / size, sep="=")
running = False
"""


def peaks(script: str, threshold: int) -> dict[str, float]:
    """What each call of a script takes at most, in vectors as long as the parameters."""
    ended = Command("-c", script, threshold).wait()
    assert ended.status == 0, ended.stderr
    return {name: float(value) for name, value in (line.split("=") for line in ended.stdout.splitlines())}


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc")
@pytest.mark.all
def test_memory_of_the_process_does_not_grow_with_sources_and_a_step_takes_one_gradient():
    found = peaks(GROWTH, 1 << 20)
    # In vectors as long as the 32 M parameters, of which the embedding is a third.
    assert found["many"] < found["few"] + 0.25
    assert found["many"] < 2 and found["step"] < 2.5


SUMS = """
import sys
from gradscope.gradients import Resources, TokenJacobian

def make(prompts):
    rows = [Response(draw(4), draw(8), advantage=(-1.0) ** i, group=i // 2) for i in range(2 * prompts)]
    return collate(rows)

def sums(prompts, vectors):
    batch = make(prompts)
    weights = torch.randn(vectors, batch.num_tokens, generator=generator)
    found = TokenJacobian(policy, batch, Resources(5 * size // 4, micro_batch=2)).gram(weights, way="sketches")
    assert found.plan.way == "sketches", found.plan

calls = {"warm": lambda: sums(1, 1), "few": lambda: sums(1, 2), "many": lambda: sums(3, 3)}
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc")
@pytest.mark.all
def test_summed_gradients_keep_to_their_budget_however_many_prompts_and_vectors():
    start, rest = GROWTH.split("calls = {}")
    found = peaks(start + SUMS + rest[rest.index("for name, call in") :], 1 << 16)
    # A whole set of vectors would be 2 and 9 in this unit; the passes' own activations are a tenth or two.
    assert found["many"] < found["few"] + 0.4, found
    assert max(found["many"], found["few"]) < 1.25 + 0.5, found
