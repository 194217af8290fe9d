"""The sampler of an engine, by its name."""

from __future__ import annotations

import pytest
from support.policies import make_policy
from support.refusals import refused

from gradscope.sampling import HFSampler, make_sampler, vllm


@pytest.fixture(scope="module")
def policy():
    return make_policy("qwen2")


def test_hf_samples_with_the_policy_itself(policy):
    sampler = make_sampler("hf", policy, batch_size=7, progress=False)
    assert sampler == HFSampler(policy, batch_size=7, progress=False)


def test_vllm_gets_what_is_meant_for_it(policy, monkeypatch):
    """Without starting it: the sampler itself has tests of its own."""

    class Recorded:
        def __init__(self, policy, **settings) -> None:
            self.policy, self.settings = policy, settings

        def sample(self, *args, **settings) -> None: ...

        def sync(self, weights) -> None: ...
        def close(self) -> None: ...

    monkeypatch.setattr(vllm, "VLLMSampler", Recorded)
    sampler = make_sampler("vllm", policy, batch_size=7, dtype="bfloat16", memory=0.2, progress=False)
    assert sampler.policy is policy
    assert sampler.settings == {"dtype": "bfloat16", "memory": 0.2, "progress": False}


def test_vllm_refuses_a_policy_without_a_folder(policy):
    with refused():
        make_sampler("vllm", policy)


def test_an_engine_that_is_not_known_is_refused(policy):
    with refused("VLLM"):
        make_sampler("VLLM", policy)
