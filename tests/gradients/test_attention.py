"""Attention in strips of queries, against plain attention in float64: whole, and inside models of many kinds."""

from functools import partial

import pytest
import torch
import transformers
from support.oracle import TrueFloat64
from support.policies import CONTEXT, LLAMA_LIKE, VOCAB, fill_parameters, make_policy
from torch import Tensor
from torch.func import grad, jvp, vmap

from gradscope.gradients import attention, measuring
from gradscope.gradients.attention import Band, attend, can_strip
from gradscope.objective import can_pack

LENGTH = 23
EXACT = {"rtol": 0, "atol": 1e-13}
"""Numbers of the order of one, made of sums of some 25 products in float64: 2.2e-16 each."""


def attend_plainly(query: Tensor, key: Tensor, value: Tensor, window: int | None, softcap: float | None) -> Tensor:
    key, value = (t.repeat_interleave(query.shape[1] // key.shape[1], 1) for t in (key, value))
    scores = 0.3 * query @ key.mT
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    seen = (distance >= 0) & (distance < (window or LENGTH))
    return (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value).transpose(1, 2)


@pytest.fixture
def short_strips(monkeypatch):
    """As on a machine with little memory."""
    monkeypatch.setattr(attention, "SHORTEST", 5)
    monkeypatch.setattr(attention, "SCORES", {"cpu": 1, "cuda": 1})
    monkeypatch.setattr(attention, "PLAIN", 0)


# torch itself calls torch.jit.script the first time that forward mode is used.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("window", [None, 1, 7, 40])
def test_strips_and_all_their_derivatives_are_plain_attentions(short_strips, window, softcap):
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    states = [draw(2, heads, LENGTH, width) for heads, width in ((6, 4), (3, 4), (3, 5))]
    plain = partial(attend_plainly, window=window, softcap=softcap)
    strips = partial(attend, band=Band(window), scaling=0.3, softcap=softcap)

    seeds, tangents = draw(4, 2, LENGTH, 6, 5), [draw(3, *state.shape) for state in states]
    found = []
    for function in (plain, strips):
        leaves = [state.clone().requires_grad_() for state in states]
        out = function(*leaves)
        one = torch.autograd.grad(out, leaves, seeds[0], retain_graph=True)
        several = torch.autograd.grad(out, leaves, seeds, is_grads_batched=True)
        pull = grad(lambda seed, *at, f=function: (f(*at) * seed).sum(), (1, 2, 3))
        mapped = vmap(pull, (0, None, None, None))(seeds, *states)
        push = lambda *moves, f=function: jvp(f, (*states,), moves)[1]  # noqa: E731
        alone = jvp(lambda value, f=function: f(*states[:2], value), (states[2],), (tangents[2][0],))[1]
        found.append([out, *one, *several, *mapped, push(*(t[0] for t in tangents)), vmap(push)(*tangents), alone])
    for expected, actual in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected, **EXACT)


@pytest.mark.parametrize(
    "name", ["qwen2", "llama", "gpt2", "gemma2", "gemma3", "qwen3_moe", "opt", "mistral_window", "phi"]
)
def test_models_compute_the_same_in_strips_where_a_pass_is_long(short_strips, monkeypatch, name):
    """Gemma 3 and Mistral see 4 tokens of 30, some of Gemma's layers all."""
    model = make_policy(name, torch.float64).model
    ids = torch.randint(4, VOCAB, (2, 30), generator=torch.Generator().manual_seed(0))
    ways = []
    with TrueFloat64():
        with measuring(model):
            expected = model(input_ids=ids, use_cache=False).logits
            can_pack(model)  # which it may
        with measuring(model, 30):
            assert not can_pack(model)  # whose attention is plain however long
            for shown in (ids, ids[:, :4]):
                if shown is not ids:
                    monkeypatch.setattr(attention, "PLAIN", 1 << 20)
                logits = model(input_ids=shown, use_cache=False).logits
                ways.append(model.config._attn_implementation)
                # Layers of a model whose logits are of the order of ten.
                torch.testing.assert_close(logits, expected[:, : shown.shape[1]], rtol=0, atol=1e-11)
    assert ways == [attention.STRIPS, "eager"]
    assert model.config._attn_implementation == "eager"


def sinks() -> transformers.PreTrainedModel:
    """Attention that gives some of its weight to nothing, and says so by an argument."""
    config = transformers.GptOssConfig(
        **(LLAMA_LIKE | {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": VOCAB, "head_dim": 8}),
        num_local_experts=2, num_experts_per_tok=1, max_position_embeddings=CONTEXT, sliding_window=4,
    )  # fmt: skip
    return transformers.GptOssForCausalLM(config)


def chunks() -> transformers.PreTrainedModel:
    """Attention within chunks, which are no band."""
    config = transformers.Llama4TextConfig(
        **(LLAMA_LIKE | {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": VOCAB, "head_dim": 8}),
        num_local_experts=2, intermediate_size_mlp=48, attention_chunk_size=6, no_rope_layers=[1, 1],
        max_position_embeddings=CONTEXT, pad_token_id=0,
    )  # fmt: skip
    return transformers.Llama4ForCausalLM(config)


@pytest.mark.parametrize("make", [sinks, chunks])
def test_attention_of_another_kind_stays_plain(short_strips, make):
    model = make().double().eval()
    fill_parameters(model, 0)
    ids = torch.arange(4, 24)[None]
    with measuring(model):
        expected = model(input_ids=ids, use_cache=False).logits
        assert not can_strip(model)
    with measuring(model, 20):
        assert torch.equal(model(input_ids=ids, use_cache=False).logits, expected)
        assert model.config._attn_implementation == "eager"
