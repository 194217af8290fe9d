"""Common decoders by backward rules: which models go by them, and that every number is brute force's either way."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from support.decoders import COMMON, LATE, SANDWICHED, attend_eagerly, windowed
from support.exact import FLOAT32, TRUE_FLOAT64, assert_same, cached_policy, random_ids
from support.oracle import (
    TrueFloat64,
    as_policy,
    brute_force,
    in_float64,
    largest_error,
    measure_all,
    sequences,
)
from support.policies import RULED, UNRULED, make_batch, make_model, make_policy
from support.tiers import every
from torch import Tensor
from transformers.models.llama import modeling_llama

from gradscope import measure
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


@pytest.mark.parametrize("name, attention", every(3, KINDS))
def test_a_common_decoder_goes_by_rules_and_is_exact(name, attention):
    with TrueFloat64():
        error, ruled = error_and_path(make_policy(name, torch.float64, attention=attention), *text())
    assert ruled and error < TRUE_FLOAT64


@pytest.mark.parametrize("name", UNRULED)
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


@pytest.mark.parametrize("habit", [windowed, chunked, sharper_later, capped_later, clip_later])
def test_a_habit_that_begins_after_the_probe_sends_longer_sequences_along_the_graph(habit, monkeypatch):
    if habit is clip_later:
        monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", habit)
    else:

        def attend(*args, **kwargs):
            return attend_eagerly(*args, **kwargs, change=habit)

        monkeypatch.setattr(modeling_llama, "eager_attention_forward", attend)
    policy = make_policy("llama", torch.float64)
    ids, targets = text()
    with TrueFloat64(), measuring(policy.model):
        meter = TokenGradientMeter(policy, ids)
        assert meter.decoder is not None
        for length in (LATE, len(ids)):
            some = targets[targets < length]
            everything = torch.arange(len(some))
            ours = meter.measure(ids[:length], some, everything, temperature=1.0)
            assert largest_error(ours, brute_force(policy, ids[:length], some)) < TRUE_FLOAT64


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
def test_a_block_put_together_otherwise_is_exact(forward, monkeypatch):
    monkeypatch.setattr(modeling_llama.LlamaDecoderLayer, "forward", forward)
    with TrueFloat64():
        assert error_and_path(make_policy("llama", torch.float64), *text())[0] < TRUE_FLOAT64


def test_activations_that_follow_from_no_others_are_not_accounted_for():
    policy = make_policy("llama", torch.float64)
    ids, targets = text()
    with measuring(policy.model):
        meter = TokenGradientMeter(policy, ids)
        stack = Stack.of([SequenceTokens(ids, targets, torch.arange(len(targets)))], torch.float64)
        with meter.decoder.recording() as seen:
            head = meter.head.measure(stack)
        assert meter.decoder.follow(stack, head, [*seen]) is not None
        block = meter.decoder.blocks[1]
        for part in (block.query, block.output, block.mlp_norm, block.gate, block.down):
            recorded = seen[1].inputs[part.name]
            seen[1].inputs[part.name] = recorded.clone()
            seen[1].inputs[part.name][0, 20] *= 1.01
            assert meter.decoder.follow(stack, head, [*seen]) is None
            seen[1].inputs[part.name][0, 20] = torch.nan
            assert meter.decoder.follow(stack, head, [*seen]) is None
            seen[1].inputs[part.name] = recorded
        n = stack.ids.shape[1]
        for mask in (SimpleNamespace(), torch.ones(1, n), torch.ones(1, 1, 3, 3), torch.ones(2, 1, n, n)):
            seen[1].mask = mask
            assert meter.decoder.follow(stack, head, [*seen]) is None


def normalize_all_heads_together(attention: modeling_llama.LlamaAttention, q: Tensor) -> Tensor:
    return attention.q_norm(q)


def normalize_heads_first(attention: modeling_llama.LlamaAttention, q: Tensor) -> Tensor:
    heads = q.unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
    return attention.q_norm(heads).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("normalize, width", [(normalize_all_heads_together, 32), (normalize_heads_first, 8)])
@pytest.mark.parametrize("length", [4, 28])
def test_queries_that_are_normalized_otherwise_are_exact(normalize, width, length, monkeypatch):
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

    monkeypatch.setattr(modeling_llama, "LlamaAttention", Attention)
    with TrueFloat64():
        error, ruled = error_and_path(make_policy("llama", torch.float64), *text(length))
    assert ruled == (normalize is normalize_heads_first) and error < TRUE_FLOAT64


# Both paths, in every dtype and however it is cut up.


@pytest.mark.parametrize("rules", [True, False], ids=["rules", "graph"])
# With biases, and with norms of heads; llama has neither.
@pytest.mark.parametrize("name", every(2, ["qwen2", "qwen3"]))
@pytest.mark.parametrize(
    "ids, targets",
    [
        (torch.full((20,), 9), list(range(2, 20, 3))),
        (torch.tensor([5, 9] * 10), list(range(1, 20, 3))),
        (random_ids(30), [1, 2, 28, 29]),
        (random_ids(2), [1]),
        (random_ids(3), [2]),
        (random_ids(40, seed=3), [33, 34, 39]),
    ],
    ids=["one id repeated", "two in turn", "a wide gap", "two tokens", "a prefix of two", "longer than the width"],
)
def test_every_sequence_is_exact_on_both_paths_in_float64_and_close_in_float32(name, rules, ids, targets):
    wide, targets = cached_policy(name), torch.tensor(targets)
    probe = random_ids(20)
    with TrueFloat64():
        truth = brute_force(wide, ids, targets)
        for settings in ({}, {"memory": 1}):  # one token a chunk, one of them a pass of the head
            ours = measure_all(wide, ids, targets, probe_ids=probe, rules=rules, **settings)
            assert largest_error(ours, truth) < TRUE_FLOAT64
    narrow = measure_all(make_policy(name), ids, targets, probe_ids=probe, rules=rules)
    assert largest_error(narrow, truth) < FLOAT32


@pytest.mark.parametrize("name", COMMON)
def test_rules_and_graph_give_the_same_table_of_a_batch(name):
    policy = make_policy(name, torch.float64)
    for ids, targets, temperature in sequences(
        make_batch(policy, lengths=(7, 11), prompt_lengths=(5, 5), temperature=0.7)
    ):
        with TrueFloat64():
            a, b = (measure_all(policy, ids, targets, temperature=temperature, rules=r) for r in (True, False))
            assert_same(a, b)


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


@pytest.mark.parametrize("name", ["qwen2", "llama"])
def test_the_table_has_the_norm_of_each_weighted_tokens_gradient_whatever_its_sign(name):
    policy = make_policy(name)
    batch = make_batch(policy, lengths=(8, 8), prompt_lengths=(5, 5), surprise=0.5)
    table = measure(policy, batch)
    wide = in_float64(policy)
    signs = set()
    for row, part in table.groupby("response"):
        ids, targets = batch.sequence(row)
        with TrueFloat64():
            for (_, token), target in zip(part.iterrows(), targets.tolist(), strict=True):
                for p in wide.model.parameters():
                    p.grad = None
                logits = wide.model(input_ids=ids[None]).logits[0, target - 1]
                (token["weight"] * logits.log_softmax(-1)[ids[target]]).backward()
                norm = sum(p.grad.square().sum() for p in wide.model.parameters()).sqrt().item()
                assert abs(token["weight"]) * token["param_grad_norm"] == pytest.approx(norm, rel=FLOAT32)
                signs.add(token["weight"] > 0)
    assert signs == {True, False}


@pytest.mark.parametrize("name", COMMON)
def test_a_bfloat16_policy_goes_by_rules_and_passes_the_self_check(name):
    policy = make_policy(name, torch.bfloat16)
    ids, targets = text()
    with measuring(policy.model):
        meter = TokenGradientMeter(policy, ids)
        assert meter.decoder is not None
        stack = Stack.of([SequenceTokens(ids, targets, torch.arange(len(targets)))])
        with meter.decoder.recording() as seen:
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
