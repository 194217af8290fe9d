"""Common decoders by backward rules: which models go by them, and that every number is brute force's either way."""

from __future__ import annotations

from types import MethodType

import pytest
import torch
from support.decoders import COMMON, LATE, SANDWICHED, attend_eagerly, windowed
from support.exact import TRUE_FLOAT64, random_ids
from support.oracle import (
    TrueFloat64,
    as_policy,
    brute_force,
    largest_error,
    measure_all,
)
from support.policies import RULED, UNRULED, make_model, make_policy
from support.tiers import every
from torch import Tensor
from transformers.models.llama import modeling_llama

from gradscope.gradients import SequenceTokens, TokenGradientMeter, check_engine, measuring
from gradscope.gradients.engine.stack import Stack
from gradscope.policy import Policy


def error_and_path(policy: Policy, ids: Tensor, targets: Tensor, **settings) -> tuple[float, bool]:
    """(largest difference from brute force, whether the meter goes by rules)."""
    truth = brute_force(policy, ids, targets)
    with measuring(policy.model):
        meter = TokenGradientMeter(policy, ids, **settings)
        ours = meter.measure(ids, targets, torch.arange(len(targets)), temperature=1.0)
    return largest_error(ours, truth), meter.decoder is not None


def text(length: int = 28) -> tuple[Tensor, Tensor]:
    """Longer than the probe that the meter learns from, with repeats, and some of its later tokens."""
    ids = random_ids(length)
    ids[2::5] = 9
    return ids, torch.tensor([t for t in (1, 2, 3, 10, 16, 17, 21, 22, 23, 26, 27) if t < length])


# sdpa ignores Gemma 2's soft cap.
KINDS = [(n, a) for n in (*COMMON, *SANDWICHED, *RULED) for a in ("eager", "sdpa") if (n, a) != ("gemma2", "sdpa")]


@pytest.mark.parametrize("name, attention", every(6, KINDS))
def test_a_common_decoder_goes_by_rules_and_is_exact(name, attention):
    with TrueFloat64():
        error, ruled = error_and_path(make_policy(name, torch.float64, attention=attention), *text())
    assert ruled and error < TRUE_FLOAT64


@pytest.mark.parametrize("name", every(3, UNRULED))
def test_a_near_relative_goes_along_its_graph_and_is_exact(name):
    with TrueFloat64():
        error, ruled = error_and_path(make_policy(name, torch.float64), *text())
    assert not ruled and error < TRUE_FLOAT64


# What a short probe cannot see: habits that begin at position 18.


def chunked(scores: Tensor) -> Tensor:
    chunk = torch.arange(scores.shape[-1]) // LATE
    return scores.masked_fill(chunk[:, None] != chunk, -torch.inf)


def sharper_later(scores: Tensor) -> Tensor:
    return scores * (1 + 0.05 * (torch.arange(scores.shape[-2]) >= LATE))[:, None]


def capped_later(scores: Tensor) -> Tensor:
    return torch.cat([scores[..., :LATE, :], 2 * (scores[..., LATE:, :] / 2).tanh()], -2)


def clip_later(mlp: modeling_llama.LlamaMLP, x: Tensor) -> Tensor:
    hidden = mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x)
    return mlp.down_proj(torch.cat([hidden[:, :LATE], hidden[:, LATE:].clamp(-0.3, 0.3)], 1))


@pytest.mark.parametrize("memory", every(2, [1, 1 << 30]))
@pytest.mark.parametrize("habit", every(2, [windowed, chunked, sharper_later, capped_later, clip_later]))
def test_a_habit_that_begins_after_the_probe_sends_longer_sequences_along_the_graph(habit, memory, monkeypatch):
    policy = make_policy("llama", torch.float64)
    if habit is clip_later:
        for layer in policy.model.model.layers:
            layer.mlp.forward = MethodType(habit, layer.mlp)
    else:

        def attend(*args, **kwargs):
            return attend_eagerly(*args, **kwargs, change=habit)

        monkeypatch.setattr(modeling_llama, "eager_attention_forward", attend)
    ids, targets = text()
    with TrueFloat64(), measuring(policy.model):
        meter = TokenGradientMeter(policy, ids, memory=memory)
        assert meter.decoder is not None
        for length in (LATE, len(ids)):
            some = targets[targets < length]
            everything = torch.arange(len(some))
            ours = meter.measure(ids[:length], some, everything, temperature=1.0)
            assert largest_error(ours, brute_force(policy, ids[:length], some)) < TRUE_FLOAT64


@pytest.mark.parametrize("memory", [1 << 30, 1], ids=["kept", "computed again"])
def test_what_stands_between_two_blocks_sends_longer_sequences_along_the_graph(memory):
    def change(_block, args, kwargs):
        late = torch.arange(args[0].shape[1]) >= LATE
        return (args[0] * (1 + late)[:, None], *args[1:]), kwargs

    policy = make_policy("llama", torch.float64)
    policy.blocks[1].register_forward_pre_hook(change, with_kwargs=True)
    with TrueFloat64():
        error, ruled = error_and_path(policy, *text(), memory=memory)
    assert ruled and error < TRUE_FLOAT64


def positional(block: modeling_llama.LlamaDecoderLayer, hidden_states, attention_mask=None, **kwargs):
    """The same, but for how attention is called."""
    y, _ = block.self_attn(block.input_layernorm(hidden_states), kwargs["position_embeddings"], attention_mask)
    hidden_states = hidden_states + y
    return hidden_states + block.mlp(block.post_attention_layernorm(hidden_states))


def gated(block: modeling_llama.LlamaDecoderLayer, hidden_states, **kwargs):
    """A residual that is weighed by position."""
    y, _ = block.self_attn(hidden_states=block.input_layernorm(hidden_states), **kwargs)
    late = (torch.arange(y.shape[1]) >= LATE).to(y)[:, None]
    hidden_states = hidden_states + (1 + late) * y
    return hidden_states + block.mlp(block.post_attention_layernorm(hidden_states))


def frozen_path(block: modeling_llama.LlamaDecoderLayer, hidden_states, **kwargs):
    """What is right forwards and lets nothing back through the MLP."""
    y, _ = block.self_attn(hidden_states=block.input_layernorm(hidden_states), **kwargs)
    hidden_states = hidden_states + y
    return hidden_states + block.mlp(block.post_attention_layernorm(hidden_states).detach())


@pytest.mark.parametrize("forward", [positional, gated, frozen_path])
def test_a_block_put_together_otherwise_is_exact(forward):
    policy = make_policy("llama", torch.float64)
    for layer in policy.model.model.layers:
        layer.forward = MethodType(forward, layer)
    with TrueFloat64():
        assert error_and_path(policy, *text())[0] < TRUE_FLOAT64


def normalize_all_heads_together(attention: modeling_llama.LlamaAttention, q: Tensor) -> Tensor:
    return attention.q_norm(q)


def normalize_heads_first(attention: modeling_llama.LlamaAttention, q: Tensor) -> Tensor:
    heads = q.unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
    return attention.q_norm(heads).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("normalize, width", [(normalize_all_heads_together, 32), (normalize_heads_first, 8)])
@pytest.mark.parametrize("length", [4, 28])
def test_queries_that_are_normalized_otherwise_are_exact(normalize, width, length):
    class Attention(modeling_llama.LlamaAttention):
        def __init__(self, **settings):
            super().__init__(**settings)
            self.q_norm = modeling_llama.LlamaRMSNorm(width)

        def forward(self, hidden_states, position_embeddings, attention_mask, **_):
            q = normalize(self, self.q_proj(hidden_states))
            heads = (q, self.k_proj(hidden_states), self.v_proj(hidden_states))
            q, k, v = (t.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for t in heads)
            q, k = modeling_llama.apply_rotary_pos_emb(q, k, *position_embeddings)
            y, _ = attend_eagerly(self, q, k, v, None, self.scaling, lambda scores: scores)
            return self.o_proj(y.flatten(2)), None

    policy = make_policy("llama", torch.float64)
    for place, layer in enumerate(policy.model.model.layers):
        own = Attention(config=policy.model.config, layer_idx=place).double()
        own.load_state_dict(layer.self_attn.state_dict(), strict=False)
        layer.self_attn = own
    with TrueFloat64():
        error, ruled = error_and_path(policy, *text(length))
    assert ruled == (normalize is normalize_heads_first) and error < TRUE_FLOAT64


# Both paths, in every dtype and however it is cut up.


@pytest.mark.parametrize("sharpness", [30.0, 1000.0])
def test_attention_that_sees_nearly_one_key_alone_is_exact(sharpness):
    model = make_model("llama", dtype=torch.float64)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(sharpness)
    with TrueFloat64():
        error, ruled = error_and_path(as_policy(model), *text())
    # Scores of some 1000 are rounded by 1e-13, and so are the logarithms of the probabilities.
    assert ruled and error < 1e-8


@pytest.mark.parametrize("name", COMMON)
def test_a_bfloat16_policy_goes_by_rules_and_passes_the_self_check(name):
    policy = make_policy(name, torch.bfloat16)
    ids, targets = text()
    with measuring(policy.model):
        meter = TokenGradientMeter(policy, ids)
        assert meter.decoder is not None
        stack = Stack.of([SequenceTokens(ids, targets, torch.arange(len(targets)))])
        with meter.decoder.recording(stack) as seen:
            head = meter.head.measure(stack)
        assert meter.decoder.follow(stack, head, [*seen]) is not None
        assert check_engine(meter, [SequenceTokens(ids, targets, torch.tensor([0, 5, 10]))]).tokens == 3


@pytest.mark.parametrize("name", COMMON)
def test_products_in_bfloat16_are_near_the_exact_norms_and_not_the_same(name):
    policy, (ids, targets) = make_policy(name), text()
    with measuring(policy.model):
        meter = TokenGradientMeter(policy, ids, precision="bfloat16")
        assert meter.precision == "bfloat16"
        fast = meter.measure(ids, targets, torch.arange(len(targets)), temperature=1.0)
    exact = measure_all(policy, ids, targets)
    error = (fast.act_grad_norm / exact.act_grad_norm - 1).abs().max()
    error = max(error, (fast.param_grad_norm / exact.param_grad_norm - 1).abs().max())
    # Each factor of a product is rounded by 2⁻⁹; seen: 0.6 %.
    assert 1e-6 < error < 2e-2
