"""Sampling: tokens follow the policy, log-probabilities are a full forward pass's, batching changes nothing."""

from __future__ import annotations

from dataclasses import replace
from math import nan

import numpy as np
import pytest
import torch
from support.engines import full_logprobs
from support.policies import BOS, CAUSAL, CONTEXT, EOS, VOCAB, make_policy
from support.refusals import refused
from support.tiers import every

from gradscope.errors import NanLogitsError
from gradscope.policy import Policy
from gradscope.rollouts import read_rollouts, write_rollouts
from gradscope.sampling import HFSampler, Sample, batch_rows, rollout_rows
from gradscope.sampling.hf import draw_tokens
from gradscope.sampling.kv_cache import GrowingTensor
from gradscope.tasks import Question

PROMPTS = [[4, 5, 6, 7, 8, 9, 10], [11], [12, 13, 14]]


def sample(policy: Policy, *, seed: int = 0, batch_size: int = 64, **settings) -> list[list[Sample]]:
    settings = {"n": 3, "temperature": 1.0, "max_new_tokens": 12} | settings
    prompts = settings.pop("prompts", PROMPTS)
    sampler = HFSampler(policy, batch_size=batch_size, progress=False)
    return sampler.sample(prompts, generator=torch.Generator().manual_seed(seed), **settings)


def ids(samples: list[list[Sample]]) -> list[list[list[int]]]:
    return [[s.response_ids for s in group] for group in samples]


def stopping_policy(name: str, stops: list[int], dtype: torch.dtype = torch.float32, **settings) -> Policy:
    """A policy with several stop tokens, so that responses end at different lengths."""
    policy = make_policy(name, dtype, **settings)
    policy.model.generation_config.eos_token_id = stops
    return policy


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", every(2, CAUSAL))
def test_logprobs_are_those_of_a_full_forward_pass_of_each_response(name, attention):
    policy = stopping_policy(name, list(range(3, VOCAB, 8)), attention=attention)
    for prompt, samples in zip(PROMPTS, sample(policy, temperature=0.7), strict=True):
        for s in samples:
            # float32 forward passes of different shapes: 1e-5 at logits of about 10.
            expected = full_logprobs(policy, prompt, s.response_ids, 0.7).float()
            torch.testing.assert_close(torch.tensor(s.logprobs), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", every(2, [torch.float32, torch.float64]))  # float64 batches are not padded
@pytest.mark.parametrize("name", every(3, ["qwen2", "gemma3", "opt", "mixtral"]))
def test_responses_do_not_depend_on_the_batch_size(name, dtype):
    policy = stopping_policy(name, list(range(3, VOCAB, 8)), dtype)
    one_by_one = sample(policy, batch_size=1)
    assert len({len(s.response_ids) for group in one_by_one for s in group}) > 2  # rows leave at different steps
    for batch_size in (2, 4, 64):
        assert ids(sample(policy, batch_size=batch_size)) == ids(one_by_one)


def test_a_response_depends_on_the_seed_and_every_response_has_its_own_stream():
    policy = make_policy("qwen2")
    same_prompt = sample(policy, prompts=[[4, 5], [4, 5]], n=2)
    assert ids(same_prompt) == ids(sample(policy, prompts=[[4, 5], [4, 5]], n=2))
    assert ids(same_prompt) != ids(sample(policy, prompts=[[4, 5], [4, 5]], n=2, seed=1))
    assert len({tuple(s.response_ids) for group in same_prompt for s in group}) == 4


@pytest.mark.parametrize("name", ["qwen2", "gemma3", "opt"])
def test_greedy_takes_the_likeliest_token_of_a_full_forward_pass(name):
    policy = stopping_policy(name, list(range(3, VOCAB, 8)))
    samples = sample(policy, greedy=True, temperature=0.7)
    for prompt, (first, *others) in zip(PROMPTS, samples, strict=True):
        expected = []
        while len(expected) < 12 and not (expected and expected[-1] % 8 == 3):
            with torch.no_grad():
                expected.append(int(policy.model(input_ids=torch.tensor([prompt + expected])).logits[0, -1].argmax()))
        assert first.response_ids == expected and first.finished == (expected[-1] % 8 == 3)
        logprobs = full_logprobs(policy, prompt, expected, 0.7).float()
        torch.testing.assert_close(torch.tensor(first.logprobs), logprobs, atol=1e-5, rtol=1e-5)  # as above
        assert others == [first, first]


def test_the_first_tokens_follow_the_policys_distribution():
    policy = make_policy("llama")
    n, settings = 4000, {"prompts": [[4, 5]], "max_new_tokens": 1, "temperature": 0.7}
    drawn = [s.response_ids[0] for s in sample(policy, n=n, batch_size=n, **settings)[0]]
    with torch.no_grad():
        expected = (policy.model(input_ids=torch.tensor([[4, 5]])).logits[0, -1].double() / 0.7).softmax(-1)
    counts = torch.bincount(torch.tensor(drawn), minlength=VOCAB).double()
    big = expected * n > 10
    chi2 = ((counts - n * expected)[big] ** 2 / (n * expected)[big]).sum()
    dof = int(big.sum())
    assert dof > 5 and chi2 < dof + 5 * (2 * dof) ** 0.5  # five standard deviations of a χ² with that many degrees


def test_inverse_cdf_draws_the_token_whose_slice_holds_the_uniform_number():
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(200, 17, generator=generator)
    logits[:, 16] = -torch.inf
    uniforms = torch.rand(200, generator=generator, dtype=torch.float64)
    uniforms[:2] = torch.tensor([0.0, 1.0])
    tokens, logprobs = draw_tokens(logits, uniforms, 0.5)
    for row in range(200):
        probs, below, token = torch.softmax(logits[row].double() / 0.5, -1).tolist(), 0.0, 0
        while below + probs[token] <= min(float(uniforms[row]), 1 - 1e-9):
            below += probs[token]
            token += 1
        assert int(tokens[row]) == token
        assert float(logprobs[row].exp()) == pytest.approx(probs[token], rel=1e-5)  # float32


def test_a_response_ends_with_its_stop_token_or_at_the_length():
    policy = stopping_policy("llama", [EOS, *range(40, 46)])
    samples = [s for group in sample(policy, n=8) for s in group]
    assert {s.finished for s in samples} == {True, False}
    for s in samples:
        stops = [t in policy.stop_ids for t in s.response_ids]
        assert not any(stops[:-1]) and stops[-1] == s.finished
        assert s.finished or len(s.response_ids) == 12
        assert len(s.logprobs) == len(s.response_ids)


def test_finished_responses_cost_no_more_forward_passes():
    policy = stopping_policy("llama", list(range(3, VOCAB, 4)))
    rows = []
    hook = policy.model.register_forward_pre_hook(
        lambda _, args, kwargs: rows.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    try:
        samples = [s for group in sample(policy, n=8) for s in group]
    finally:
        hook.remove()
    assert rows[0] == len(PROMPTS)  # each prompt is computed once
    # A token after the first costs one row; the last token of a response is never fed back.
    assert sum(rows[1:]) == sum(len(s.response_ids) - 1 for s in samples)


def test_stop_ids_come_from_the_generation_configuration_first():
    policy = make_policy("llama", tokenizer=True)
    assert policy.stop_ids == {EOS}
    policy.model.generation_config.eos_token_id = [BOS, EOS]
    assert policy.stop_ids == {BOS, EOS}
    policy.model.generation_config.eos_token_id = None
    policy.model.config.eos_token_id = BOS
    assert policy.stop_ids == {BOS}
    policy.model.config.eos_token_id = None
    assert policy.stop_ids == {EOS}
    assert replace(policy, tokenizer=None).stop_ids == set()


def test_the_context_ends_a_response_and_a_prompt_that_fills_it_is_refused():
    policy = stopping_policy("gpt2", [])
    samples = sample(policy, prompts=[[5] * (CONTEXT - 3), [5] * 4], n=1)
    assert [len(group[0].response_ids) for group in samples] == [3, 12]
    with refused("prompt 1", CONTEXT):
        sample(policy, prompts=[[5], [5] * CONTEXT])


def test_settings_and_prompts_that_cannot_be_sampled_are_refused():
    policy = make_policy("llama")
    for settings in (
        {"n": 0},
        {"max_new_tokens": 0},
        {"batch_size": 0},
        {"temperature": 0.0},
        {"temperature": float("nan")},
    ):
        with refused(next(iter(settings))):
            sample(policy, **settings)
    with refused("prompt 1"):
        sample(policy, prompts=[[4], []])
    for token in (-1, VOCAB):
        with refused("prompt 0", VOCAB - 1):
            sample(policy, prompts=[[4, token]])


def test_logits_that_are_nan_are_refused():
    policy = make_policy("llama")
    with torch.no_grad():
        policy.model.get_input_embeddings().weight[5] = nan
    with pytest.raises(NanLogitsError):
        sample(policy)


def test_a_growing_tensor_is_what_concatenating_and_indexing_give():
    rng = np.random.default_rng(0)
    for _ in range(20):
        growing, expected = GrowingTensor(), torch.empty(5, 2, 0, 3)
        for _ in range(12):
            if rng.random() < 0.7:
                columns = torch.randn(len(expected), 2, int(rng.choice([1, 1, 1, 70])), 3)
                growing.append(columns)
                expected = torch.cat([expected, columns], dim=2)
            elif expected.shape[2]:
                rows = torch.from_numpy(rng.integers(len(expected), size=rng.integers(1, len(expected) + 3)))
                fewer = len(rows) <= len(expected)
                moved = (rows != torch.arange(len(rows))).nonzero()[:, 0] if fewer and rng.random() < 0.7 else None
                growing.take_rows(rows, moved)
                expected = expected[rows]
        assert torch.equal(growing.value, expected)


class Task:
    """Rewards a response by whether it holds the answer."""

    name = "holds-the-answer"

    def questions(self, n: int, *, seed: int) -> list[Question]:
        return QUESTIONS[:n]

    def reward(self, response: str, question: Question) -> float:
        return float(question.answer in response.split())


QUESTIONS = [Question("w4 w5", "w9", 2), Question("w6", "w10", 3)]


def test_rollout_rows_are_native_rows_that_read_back_as_on_policy(tmp_path):
    policy = make_policy("qwen3", tokenizer=True)
    settings = {"n": 4, "temperature": 0.7, "max_new_tokens": 10, "seed": 5}
    rows = rollout_rows(policy, QUESTIONS, task=Task(), **settings)
    assert [(r["group"], r["level"]) for r in rows] == [(0, 2)] * 4 + [(1, 3)] * 4
    for row, question in zip(rows, [q for q in QUESTIONS for _ in range(4)], strict=True):
        assert row["prompt"] == question.prompt and row["prompt_ids"] == policy.encode_prompt(question.prompt)
        assert row["response"].split() == [f"w{i}" for i in row["response_ids"] if i >= 4]  # no special token
        assert row["reward"] == Task().reward(row["response"], question)
    for suffix in (".jsonl", ".parquet"):
        batch = read_rollouts(write_rollouts(tmp_path / f"r{suffix}", rows), policy)
        for index, row in enumerate(rows):
            expected = full_logprobs(policy, row["prompt_ids"], row["response_ids"], 0.7).float()
            kept = batch.old_logprobs[index][batch.response_mask[index]]
            torch.testing.assert_close(kept, expected, atol=1e-5, rtol=1e-5)
        assert batch.temperature.tolist() == pytest.approx([0.7] * 8)
        assert batch.rewards.tolist() == [r["reward"] for r in rows]
    assert rollout_rows(policy, QUESTIONS, task=Task(), **settings) == rows


def test_rows_become_a_batch_of_the_same_responses():
    rows = [
        {"prompt_ids": [4, 5], "response_ids": [6], "group": 0, "temperature": 0.7, "reward": 1.0, "level": 2},
        {"prompt_ids": [4], "response_ids": [7, 8], "group": 1, "temperature": 0.7, "reward": -1.0, "level": 2},
    ]
    batch = batch_rows(rows)
    for index, row in enumerate(rows):
        sequence, kept = batch.sequence(index)
        assert sequence.tolist() == row["prompt_ids"] + row["response_ids"]
        assert sequence[kept].tolist() == row["response_ids"]
    assert batch.rewards.tolist() == [1.0, -1.0] and batch.group_ids.tolist() == [0, 1]
    assert batch.temperature.tolist() == pytest.approx([0.7, 0.7]) and batch.old_logprobs is None
