"""cuDNN's attention, which is planned anew for every shape, is left out wherever shapes vary, and comes back."""

from contextlib import contextmanager

import torch
from support.policies import make_batch, make_policy
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention

from gradscope.objective import batch_statistics
from gradscope.sampling import HFSampler
from gradscope.trainer import TrainConfig, train

TINY = {"people": (2,), "steps": 1, "questions_per_step": 2, "group_size": 2, "mini_batch_size": 4, "save_every": 1}
TINY |= {"max_new_tokens": 40, "trackers": (), "device": "cpu"}


def watch(model) -> list[bool]:
    """Whether cuDNN's was allowed, at every pass through an attention module."""
    found: list[bool] = []
    for module in model.modules():
        if isinstance(module, (LlamaAttention, Qwen2Attention)):
            module.register_forward_hook(lambda *_: found.append(torch.backends.cuda.cudnn_sdp_enabled()))
    return found


def test_sampling_and_statistics_are_without_it():
    policy = make_policy("llama")
    batch, seen = make_batch(policy), watch(policy.model)
    settings = {"n": 2, "temperature": 1.0, "max_new_tokens": 4, "generator": torch.Generator()}
    HFSampler(policy, progress=False).sample([[5, 6, 7]], **settings)
    batch_statistics(policy.model, batch, micro_batch_size=2, device=policy.device)
    assert len(seen) >= 8 and not any(seen) and torch.backends.cuda.cudnn_sdp_enabled()


def test_so_is_training_its_backward_passes_included(tmp_path):
    seen = []

    @contextmanager
    def look(step):
        seen.append(watch(step.policy.model))
        yield

    config = TrainConfig(**TINY, precision="bfloat16", gradient_checkpointing=True)
    train(config, tmp_path / "run", on_step=look, progress=False)
    assert len(seen[0]) >= 8 and not any(seen[0]) and torch.backends.cuda.cudnn_sdp_enabled()


def test_where_it_was_forbidden_it_stays_so():
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        policy = make_policy("llama")
        batch_statistics(policy.model, make_batch(policy), micro_batch_size=2, device=policy.device)
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)
