"""Where the model is cut in two, and that a recorded pass leaves the model's numbers and modules alone."""

from __future__ import annotations

import pytest
import torch
from support import handmade
from support.oracle import as_policy
from support.policies import CAUSAL, LAYERS, VOCAB, make_policy
from torch import Tensor

from gradscope.gradients import measuring
from gradscope.gradients.engine.ownership import find_ownership, probe_model
from gradscope.gradients.engine.recording import Recorder, find_cut
from gradscope.policy import Policy

SPLITS = {
    "qwen2": "model.layers.2.self_attn.o_proj",
    "llama": "model.layers.2.self_attn.o_proj",
    "gpt2": "transformer.h.2.attn.c_proj",
    "gemma2": "model.layers.2.self_attn.o_proj",
    "gemma3": "model.layers.2.self_attn.o_proj",
    "mixtral": "model.layers.2.self_attn.o_proj",
    "qwen3": "model.layers.2.self_attn.o_proj",
    "qwen3_moe": "model.layers.2.self_attn.o_proj",
    "gpt_neox": "gpt_neox.layers.2.attention.dense",
    "phi": "model.layers.2.self_attn.dense",
    # It flattens positions before its feed-forward network: nothing says which row is which position.
    "opt": None,
}


def random_ids(vocab: int = VOCAB, length: int = 16) -> Tensor:
    return torch.randint(4, vocab, (length,), generator=torch.Generator().manual_seed(0))


def split_of(policy: Policy, vocab: int = VOCAB) -> str | None:
    ids = random_ids(vocab)
    with measuring(policy.model):
        return find_cut(
            policy.model,
            policy.blocks,
            find_ownership(policy.model, policy.blocks, probe_model(policy.model, policy.blocks, ids)),
            ids,
        ).split_point


@pytest.mark.parametrize("name", CAUSAL)
def test_the_split_point_is_the_output_projection_of_the_last_attention(name):
    assert split_of(make_policy(name)) == SPLITS[name]


NO_JOINT = (
    "embeddings_passed_to_every_block",
    "skip_over_the_last_block",
    "head_that_mixes_positions",
    "convolution_and_token_shift",
    "rows_sorted_by_content",
)


@pytest.mark.parametrize("name", NO_JOINT)
def test_there_is_no_split_point_where_something_mixes_positions_behind_it_or_goes_around_it(name):
    assert split_of(as_policy(handmade.make(name)), handmade.VOCAB) is None


@pytest.mark.parametrize("name", ["plain", "first_values_reused_by_every_block", "head_with_layers_of_its_own"])
def test_the_split_point_of_a_handmade_decoder(name):
    assert split_of(as_policy(handmade.make(name)), handmade.VOCAB) == "model.layers.2.o"


@pytest.mark.parametrize("part", ["head", "body"])
@pytest.mark.parametrize("name", ["qwen2", "gpt2", "gpt_neox", "opt"])
def test_recording_changes_no_logit_and_leaves_no_hook(name, part):
    policy, ids = make_policy(name, torch.float64), random_ids()
    with measuring(policy.model):
        ownership = find_ownership(policy.model, policy.blocks, probe_model(policy.model, policy.blocks, ids))
        with torch.no_grad():
            expected = policy.model(input_ids=ids[None], use_cache=False).logits
        with Recorder(policy.model, policy.blocks, ownership, SPLITS[name], part) as recorder:
            logits = policy.model(input_ids=ids[None], use_cache=False).logits
    assert torch.equal(logits.detach(), expected)
    assert len(recorder.block_edges) == (LAYERS if part == "body" else 1)
    assert len(recorder.splits) == (1 if SPLITS[name] is None else 2)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in policy.model.modules())


@pytest.mark.parametrize("name", ["qwen2", "gpt2", "gpt_neox"])
def test_gradients_through_both_parts_are_those_of_the_whole(name):
    policy, ids = make_policy(name, torch.float64), random_ids()
    with measuring(policy.model):
        ownership = find_ownership(policy.model, policy.blocks, probe_model(policy.model, policy.blocks, ids))
        with Recorder(policy.model, policy.blocks, ownership, SPLITS[name], "head") as head:
            logits = policy.model(input_ids=ids[None], use_cache=False).logits
        seed = torch.randn(logits.shape, dtype=logits.dtype, generator=torch.Generator().manual_seed(1))
        at_splits = torch.autograd.grad(logits, head.splits, seed)
        with Recorder(policy.model, policy.blocks, ownership, SPLITS[name], "body") as body:
            whole = policy.model(input_ids=ids[None], use_cache=False).logits
        expected = torch.autograd.grad(whole, body.block_edges, seed, retain_graph=True)
        ours = torch.autograd.grad(body.splits, body.block_edges, at_splits)
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)
