"""Logged log-probabilities that are silently 0.0, or the neighbour's, are refused; drifted ones are not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.policies import make_batch, make_policy

from gradscope.errors import InputError
from gradscope.gradients import measure
from gradscope.gradients.logged import refuse_foreign_logprobs


def plant(seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(n, generator=generator).clamp(1e-4).log() for n in (12, 30, 1, 18)]


def test_a_log_near_the_policy_or_of_a_drifted_one_passes():
    own = plant()
    generator = torch.Generator().manual_seed(1)
    for size in (0.0, 0.1, 1.0, 3.0):
        refuse_foreign_logprobs(own, [o + size * torch.randn(o.shape, generator=generator) for o in own], "old_logprob")
    refuse_foreign_logprobs(own, [torch.full_like(o, torch.nan) for o in own], "old_logprob")
    refuse_foreign_logprobs(own[:1], [torch.zeros_like(o) for o in own[:1]], "old_logprob")  # too few to tell
    sure = [torch.full((40,), -0.01)]
    refuse_foreign_logprobs(sure, [torch.zeros(40)], "old_logprob")  # a probability that rounds to 1


@pytest.mark.parametrize("missing", [1.0, 0.95])
def test_zeros_are_no_log_probabilities(missing):
    own = plant()
    generator = torch.Generator().manual_seed(2)
    logged = [torch.where(torch.rand(o.shape, generator=generator) < missing, 0.0, o) for o in own]
    with pytest.raises(InputError, match="a probability of 1, at"):
        refuse_foreign_logprobs(own, logged, "sampler_logprob")
    half = [torch.where(torch.rand(o.shape, generator=generator) < 0.5, 0.0, o) for o in own]
    refuse_foreign_logprobs(own, half, "sampler_logprob")


@pytest.mark.parametrize(("shift", "words"), [(1, "next"), (-1, "previous")])
def test_another_tokens_are_told_by_how_far_they_are_off(shift, words):
    own = plant()
    logged = []
    for values in own:
        told = torch.full_like(values, torch.nan)
        if shift == 1:
            told[:-1] = values[1:]
        else:
            told[1:] = values[:-1]
        logged.append(told + 0.01)
    with pytest.raises(InputError, match=f"that of the {words} token: 0.01 nats"):
        refuse_foreign_logprobs(own, logged, "old_logprob")


def test_measuring_refuses_them_before_anything_else():
    policy = make_policy("llama")
    batch = make_batch(policy)
    zeros = torch.where(batch.response_mask, 0.0, torch.nan)
    for name in ("old_logprobs", "sampler_logprobs"):
        with pytest.raises(InputError, match=f"{name[:-1]} is 0.0"):
            measure(policy, replace(batch, **{name: zeros}))
