"""cuDNN's attention, which is planned anew for every shape, is left out wherever shapes vary, and comes back."""

from collections.abc import Iterator

import pytest
import torch
from support.policies import make_batch, make_policy
from transformers.models.llama.modeling_llama import LlamaAttention

from gradscope.objective import batch_statistics
from gradscope.sampling import HFSampler
from gradscope.trainer import TrainConfig, train

TINY = {"people": (2,), "steps": 1, "questions_per_step": 2, "group_size": 2, "mini_batch_size": 4, "save_every": 1}
TINY |= {"max_new_tokens": 40, "trackers": (), "device": "cpu"}


@pytest.fixture
def seen(monkeypatch) -> Iterator[list[bool]]:
    """Whether cuDNN's was allowed, at every pass through an attention module."""
    found, forward = [], LlamaAttention.forward

    def watched(*args, **kwargs):
        found.append(torch.backends.cuda.cudnn_sdp_enabled())
        return forward(*args, **kwargs)

    monkeypatch.setattr(LlamaAttention, "forward", watched)
    yield found
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_sampling_and_statistics_are_without_it(seen):
    policy = make_policy("llama")
    batch = make_batch(policy)
    seen.clear()
    settings = {"n": 2, "temperature": 1.0, "max_new_tokens": 4, "generator": torch.Generator()}
    HFSampler(policy, progress=False).sample([[5, 6, 7]], **settings)
    batch_statistics(policy.model, batch, micro_batch_size=2, device=policy.device)
    assert len(seen) >= 8 and not any(seen)


def test_so_is_training_its_backward_passes_included(seen, tmp_path):
    train(TrainConfig(**TINY, precision="bfloat16", gradient_checkpointing=True), tmp_path / "run", progress=False)
    begun = seen[seen.index(False) :]  # loading tries the policy once
    assert len(begun) > 40 and not any(begun)


def test_where_it_was_forbidden_it_stays_so():
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        policy = make_policy("llama")
        batch_statistics(policy.model, make_batch(policy), micro_batch_size=2, device=policy.device)
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)
