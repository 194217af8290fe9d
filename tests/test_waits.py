"""A GPU's queue is waited for once a step of decoding, once a chunk of tokens, and never once a parameter."""

from __future__ import annotations

from collections import Counter
from copy import copy

import pytest
import torch
from support.policies import make_batch, make_policy
from support.training import make_passes
from support.waits import counting_waits

from gradscope.gradients import SequenceTokens, TokenGradientMeter, check_engine, measuring
from gradscope.gradients.engine.autograd import GraphSequence
from gradscope.gradients.engine.decoder.body import DecoderStack
from gradscope.objective import LossSettings, Updater
from gradscope.policy import AdamWState, Policy, find_blocks
from gradscope.sampling import HFSampler

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
        with counting_waits() as waits:
            HFSampler(policy, progress=False).sample([[4, 5], [6], [7, 8, 9]], max_new_tokens=steps, **settings)
        counts.append(waits.total())
    assert counts[1] - counts[0] == 20


@pytest.mark.parametrize(
    ("name", "rules", "most"),
    # By rules: which ids of the prefix are one. Along the graph: that for each embedding, and whether the calls are the
    # whole sequence's; beside what the model's own forward pass waits for.
    [("qwen2", True, 1), ("qwen2", False, 2), ("gpt2", False, 3)],
)
def test_a_chunk_of_tokens_waits_no_more_than_it_must(name, rules, most, monkeypatch):
    policy, seen = make_policy(name), Counter()
    ids, targets = make_batch(policy).sequence(0)
    with counting_waits() as own, torch.no_grad():
        policy.model.base_model(input_ids=ids[None], use_cache=False)

    def counted(measure):
        def call(self, chunk):
            with counting_waits() as waits:
                found = measure(self, chunk)
            seen[waits.total()] += 1
            return found

        return call

    with measuring(policy.model):
        meter = TokenGradientMeter(policy, ids, rows=40, rules=rules)
        for body in (DecoderStack, GraphSequence):
            monkeypatch.setattr(body, "measure", counted(body.measure))
        meter.measure(ids, targets, torch.arange(len(targets)), temperature=1.0)
    assert seen.total() > 1
    assert max(seen) == most + (0 if rules else own.total())


def waits_of_check(blocks: int) -> int:
    policy = with_blocks(blocks)
    ids, targets = make_batch(policy).sequence(0)
    with measuring(policy.model):
        meter = TokenGradientMeter(policy, ids)
        with counting_waits() as waits:
            assert check_engine(meter, [SequenceTokens(ids, targets, torch.tensor([0, 2]))]).tokens == 2
    return waits.total()


def test_the_self_check_waits_as_often_for_a_deep_model():
    assert waits_of_check(SMALL) == waits_of_check(LARGE) <= 40


def waits_of_step(blocks: int) -> tuple[int, int]:
    """Of an optimizer step, and of AdamW's metric; the batch's own work on the host among them."""
    policy = with_blocks(blocks)
    updater = Updater(policy.model, torch.optim.SGD(policy.model.parameters(), 1e-3), policy.device, micro_batch_size=3)
    (part,) = make_passes(policy)
    with counting_waits() as waits:
        assert updater.step(part, LossSettings()).outcome == "taken"
    moments = {name: torch.rand_like(p) for name, p in policy.model.named_parameters()}
    state, length = (
        AdamWState(moments, dict.fromkeys(moments, 3), 0.999, 1e-8, 1.0),
        sum(map(torch.numel, moments.values())),
    )
    with counting_waits() as scaled:
        state.scale(policy.model, torch.ones(length))
    return waits.total(), scaled.total()


def test_an_optimizer_step_and_its_metric_wait_as_often_for_a_deep_model():
    small, large = waits_of_step(SMALL), waits_of_step(LARGE)
    assert small == large and large[1] == 1
