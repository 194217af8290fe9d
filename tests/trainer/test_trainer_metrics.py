"""The record of a step, each number against a plain loop."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import pytest
import torch

from gradscope.objective import StepResult, TokenStatistics
from gradscope.rollouts import Response, TokenBatch, collate
from gradscope.trainer.rollout import Rollout, rollout_metrics
from gradscope.trainer.step import token_metrics, update_metrics

NAN = float("nan")


def make_rollout(rewards: list[float], formats: list[bool | None]) -> Rollout:
    """Responses of 1, 2, 3, … tokens, two to a question; those of an even length are right, the last is cut off."""
    rows, responses = [], []
    for index, (reward, format_ok) in enumerate(zip(rewards, formats, strict=True)):
        ids = [7] * (index + 1)
        responses.append(Response([5], ids, group=index // 2, reward=reward))
        rows.append({"response_ids": ids, "format_ok": format_ok, "correct": index % 2 == 1})
        rows[-1]["finished"] = index + 1 < len(rewards)
    return Rollout(rows, collate(responses))


def test_rollout_metrics_are_means_over_responses():
    rewards = [3.0, 3.0, -1.0, 3.0, -3.0, -1.0]
    found = rollout_metrics(make_rollout(rewards, [True, True, True, False, None, False]))
    assert found == {
        "reward_mean": pytest.approx(statistics.mean(rewards)),
        "reward_sd": pytest.approx(statistics.stdev(rewards)),  # n − 1
        "accuracy": 0.5,
        "format_rate": pytest.approx(3 / 5),  # of those that have a format
        "response_length": 3.5,
        "truncated": pytest.approx(1 / 6),
        "equal_reward_groups": pytest.approx(1 / 3),
        "num_tokens": 21,
    }


@pytest.fixture
def scored() -> tuple[TokenBatch, TokenStatistics]:
    """Three responses with a hole in the mask; π_old is the sampler's, not the policy's own."""
    generator = torch.Generator().manual_seed(0)
    old = [[-0.1, -3.0, math.log(0.51), 0.0], [math.log(0.26), -0.7], [-1.6, -0.01, 1e-7]]
    ref = [[-0.2, -2.0, -0.5, -0.1], [-1.0, -0.6], [-1.0, -0.05, 0.0]]
    masks = [[True, False, True, True], [True, True], [True, True, True]]
    batch = collate(
        [
            Response([5] * (row + 1), [7] * len(o), old_logprobs=o, ref_logprobs=r, response_mask=m)
            for row, (o, r, m) in enumerate(zip(old, ref, masks, strict=True))
        ]
    )
    own = torch.where(batch.response_mask, -torch.rand(batch.input_ids.shape, generator=generator), 0.0)
    entropy = torch.rand(batch.input_ids.shape, generator=generator)
    sampler = own + 0.1 * torch.randn(own.shape, generator=generator)
    sampler[0, 0] = NAN  # on the prompt
    return replace(batch, sampler_logprobs=sampler), TokenStatistics(own, torch.log1p(-own.exp()), entropy)


def test_token_metrics_are_means_over_kept_tokens_and_shares_by_interval_of_the_old_probability(scored):
    batch, own = scored
    entropies, kls, drifts, counts = [], [], [], [0, 0, 0, 0]
    for row, column in batch.response_mask.nonzero().tolist():
        log_ratio = (batch.ref_logprobs[row, column] - own.logprob[row, column]).item()
        kls.append(math.exp(log_ratio) - log_ratio - 1)
        entropies.append(own.entropy[row, column].item())
        drifts.append(abs(batch.sampler_logprobs[row, column] - own.logprob[row, column]).item())
        old = math.exp(batch.old_logprobs[row, column].item())
        counts[(old >= 0.25) + (old >= 0.5) + (old >= 0.75)] += 1
    assert counts == [1, 2, 1, 4]  # a log-probability that was rounded above 0 is certain
    found = token_metrics(batch, own)
    close = {"rel": 1e-5}  # sums in float32
    assert found["entropy"] == pytest.approx(statistics.mean(entropies), **close)
    assert found["kl"] == pytest.approx(statistics.mean(kls), **close)
    assert [found[f"token_share_{i}"] for i in range(4)] == pytest.approx([count / 8 for count in counts], **close)
    assert found["mismatch_mean"] == pytest.approx(statistics.mean(drifts), **close)
    assert found["mismatch_max"] == pytest.approx(max(drifts), **close)


def result(name: str, outcome: str, tokens: int, low: int = 0, high: int = 0, dual: int = 0) -> StepResult:
    number = NAN if outcome == "empty" else 0.25
    return StepResult(name, outcome, 0.5, number, number, tokens, low, high, dual)


def test_update_metrics_have_an_entry_per_pass_and_clip_fractions_of_all_their_tokens():
    results = [
        result("low", "taken", 30, low=3, high=1),
        result("low", "empty", 0),
        result("high", "taken", 60, high=8, dual=2),
        result("high", "nonfinite", 10),
    ]
    found = update_metrics(results)
    assert found["passes"] == ["low", "low", "high", "high"]
    assert found["loss"] == [0.5] * 4
    assert found["grad_norm"] == found["grad_norm_clipped"] == pytest.approx([0.25, NAN, 0.25, 0.25], nan_ok=True)
    assert (found["clip_fraction_low"], found["clip_fraction_high"], found["clip_fraction_dual"]) == (0.03, 0.09, 0.02)
    assert (found["optimizer_steps"], found["empty_passes"], found["nonfinite_steps"]) == (2, 1, 1)
