"""A GPU's queue is waited for once a step of decoding, at most once a chunk of tokens where all parameters have rules,
and never once a parameter."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack, contextmanager
from copy import copy
from itertools import pairwise

import pytest
import torch
from accelerate import Accelerator
from support.policies import make_batch, make_policy
from support.training import make_passes
from support.waits import DEVICE, counting_waits

from gradscope.gradients import SequenceTokens, TokenGradientMeter, check_engine, measuring
from gradscope.gradients.engine.autograd import GraphSequence
from gradscope.gradients.engine.decoder.body import DecoderStack
from gradscope.objective import LossSettings, Updater
from gradscope.policy import AdamWState, Policy, find_blocks
from gradscope.sampling import HFSampler
from gradscope.trainer import train

SMALL, LARGE = 1, 4
"""Blocks of two policies that differ in the number of their parameters alone."""


def with_blocks(blocks: int) -> Policy:
    like = make_policy("llama").model
    config = copy(like.config)
    config.num_hidden_layers, config.layer_types = blocks, None
    model = type(like)(config)
    return Policy(model, None, find_blocks(model))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_step_of_decoding_waits_once_for_all_rows(name, attention):
    policy = make_policy(name, attention=attention)
    settings = {"n": 5, "temperature": 1.0, "generator": torch.Generator()}
    counts = []
    for steps in (4, 24):  # rows end on the way, and prompts are of several lengths
        settings["generator"].manual_seed(0)
        with counting_waits(policy.model) as waits:
            HFSampler(policy, progress=False).sample([[4, 5], [6], [7, 8, 9]], max_new_tokens=steps, **settings)
        counts.append(waits.total())
    assert counts[1] - counts[0] == 20


@pytest.mark.parametrize(
    ("name", "rules", "most"),
    # Along the graph: whether the calls are the whole sequence's.
    [("qwen2", True, 0), ("qwen2", False, 1), ("gpt2", False, 1)],
)
def test_a_chunk_of_tokens_waits_no_more_than_it_must(name, rules, most, monkeypatch):
    policy, seen = make_policy(name), Counter()
    ids, targets = make_batch(policy).sequence(0)
    with counting_waits(policy.model) as waits, measuring(policy.model):
        meter = TokenGradientMeter(policy, ids, rows=40, rules=rules)

        def counted(measure):
            def call(self, chunk):
                before = waits.total()
                found = measure(self, chunk)
                seen[waits.total() - before] += 1
                return found

            return call

        for body in (DecoderStack, GraphSequence):
            monkeypatch.setattr(body, "measure", counted(body.measure))
        meter.measure(ids, targets, torch.arange(len(targets)), temperature=1.0)
    assert seen.total() > 1
    assert max(seen) == most


def waits_of_check(blocks: int) -> int:
    policy = with_blocks(blocks)
    ids, targets = make_batch(policy).sequence(0)
    with counting_waits(policy.model) as waits, measuring(policy.model):
        meter = TokenGradientMeter(policy, ids)
        waits.clear()
        assert check_engine(meter, [SequenceTokens(ids, targets, torch.tensor([0, 2]))]).tokens == 2
    return waits.total()


def test_the_self_check_waits_as_often_for_a_deep_model():
    assert waits_of_check(SMALL) == waits_of_check(LARGE) <= 40


def waits_of_update(blocks: int) -> tuple[int, int]:
    """Of an optimizer step, and of AdamW's metric."""
    policy = with_blocks(blocks)
    (part,) = make_passes(policy)
    with counting_waits(policy.model) as waits:
        optimizer = torch.optim.SGD(policy.model.parameters(), 1e-3)
        updater = Updater(policy.model, optimizer, policy.device, micro_batch_size=3)
        assert updater.step(part, LossSettings()).outcome == "taken"
    with counting_waits(policy.model) as scaled:
        moments = {name: torch.rand_like(p) for name, p in policy.model.named_parameters()}
        state = AdamWState(moments, dict.fromkeys(moments, 3), 0.999, 1e-8, 1.0)
        state.scale(policy.model, torch.ones(sum(map(torch.numel, moments.values())), device=policy.device))
    return waits.total(), scaled.total()


def test_an_optimizer_step_and_its_metric_wait_as_often_for_a_deep_model():
    small, large = waits_of_update(SMALL), waits_of_update(LARGE)
    assert small == large and large[0] <= 10 and large[1] == 1


def test_a_step_of_the_trainer_waits_40_times_at_most_beside_decoding(tmp_path, monkeypatch):
    monkeypatch.setattr(Accelerator, "device", DEVICE)
    waits, entered = Counter(), []

    @contextmanager
    def watch(step):
        nonlocal waits
        if not entered:  # the model is loaded by now
            waits = counting.enter_context(counting_waits(step.policy.model))
        entered.append((waits.total(), int(step.batch.response_mask.sum(1).max())))
        yield

    sizes = {"steps": 3, "people": (2,), "questions_per_step": 2, "group_size": 4, "max_new_tokens": 60}
    sizes |= {"mini_batch_size": 4, "micro_batch_size": 4, "trackers": (), "device": "cpu"}
    with ExitStack() as counting:
        train("kk-embedded", tmp_path / "run", progress=False, on_step=watch, **sizes)
    for (before, _), (after, longest) in pairwise(entered):
        assert longest < after - before <= longest + 40
