"""Prompts computed once: the numbers and gradients of each response by itself, and never for a model that differs."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from support.oracle import TrueFloat64
from support.policies import CAUSAL, PAD, VOCAB, make_model
from support.tiers import every
from torch import Tensor, nn

from gradscope.objective import kept_logprobs, micro_batches
from gradscope.objective.batch_logprobs import loss_logprobs
from gradscope.objective.shared_prompts import can_pack, pack, packing_for
from gradscope.policy import without_packing
from gradscope.rollouts import Response, TokenBatch, collate

PACKED = ("qwen2", "llama", "gpt2", "mixtral", "qwen3", "qwen3_moe", "gpt_neox", "phi", "opt")
"""Of CAUSAL: the windows of Gemma 2 and 3 are narrower here than the trial is long."""


def make_rows() -> list[Response]:
    """Three groups, the prompt of one the beginning of another's; masks with holes, and one response in front of which
    nothing is kept for long."""
    draw = torch.Generator().manual_seed(3)
    prompts = [torch.randint(4, VOCAB, (n,), generator=draw).tolist() for n in (7, 4)]
    prompts.append(prompts[0][:5])
    rows = []
    for group, length in [(0, 3), (0, 9), (0, 1), (1, 6), (1, 6), (2, 2)]:
        ids = torch.randint(4, VOCAB, (length,), generator=draw).tolist()
        rows.append(Response(prompts[group], ids, group, temperature=(0.7, 1.3, 1.0)[group]))
    rows[1] = replace(rows[1], response_mask=[False] * 5 + [True, False, True, False])
    return rows


def make_batch(side: str = "right") -> TokenBatch:
    return collate(make_rows(), pad_id=PAD, side=side)


def alone(model: nn.Module, rows: list[Response]) -> Tensor:
    """log π of every kept token in float64, each response by itself."""
    found = []
    for row in rows:
        ids = torch.tensor([*row.prompt_ids, *row.response_ids])
        scale = torch.tensor(row.temperature).item()  # a batch keeps it in float32
        logprobs = (model(input_ids=ids[None], use_cache=False).logits[0].double() / scale).log_softmax(-1)
        mask = row.response_mask or [True] * len(row.response_ids)
        places = [len(row.prompt_ids) + k for k, keep in enumerate(mask) if keep]
        found += [logprobs[s - 1, ids[s]] for s in places]
    return torch.stack(found)


def together(model: nn.Module, batch: TokenBatch, size: int, logprobs=kept_logprobs) -> Tensor:
    """The same by micro-batches, in the order of the batch."""
    parts = {}
    for rows, piece in micro_batches(batch, size, by_group=True):
        values = logprobs(model, piece)
        values = values if values.dim() == 1 else values[piece.response_mask]
        parts |= zip(rows.tolist(), values.split(piece.response_mask.sum(1).tolist()), strict=True)
    return torch.cat([parts[row] for row in sorted(parts)])


def relative(found: list[Tensor], wanted: list[Tensor]) -> float:
    found, wanted = (torch.cat([t.flatten().double() for t in tensors]) for tensors in (found, wanted))
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", every(2, CAUSAL))
def test_each_token_has_the_logprob_that_its_response_has_alone_on_every_architecture(name, attention):
    model = make_model(name, dtype=torch.float64, attention="eager" if name == "gemma2" else attention)
    with TrueFloat64():
        wanted = alone(model, make_rows())
        assert can_pack(model) == (name in PACKED)
        for side, size in [("right", 6), ("left", 4), ("right", 1)]:
            # Everything is in float64: what differs is the order of sums.
            torch.testing.assert_close(together(model, make_batch(side), size), wanted, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["qwen2", "gpt2", "mixtral"])
def test_gradients_are_those_of_each_response_alone(name, attention):
    model = make_model(name, dtype=torch.float64, attention=attention)
    parameters = list(model.parameters())
    with TrueFloat64():
        wanted = alone(model, make_rows())
        weights = torch.linspace(-1, 2, len(wanted), dtype=torch.float64)
        expected = torch.autograd.grad((wanted * weights).sum(), parameters)
        for logprobs in (kept_logprobs, loss_logprobs):
            found = torch.autograd.grad((together(model, make_batch(), 4, logprobs) * weights).sum(), parameters)
            assert relative(found, expected) < 1e-11  # in float64: the order of sums


def test_rows_are_laid_out_as_they_were_and_taken_back():
    _, piece = micro_batches(make_batch(), 6, by_group=True)[0]
    packing = pack(piece)
    values = torch.randn(len(packing.ids), 2, 3, generator=torch.Generator().manual_seed(0))
    laid = packing.lay_out(values)
    last = (torch.arange(piece.input_ids.shape[1]) * piece.response_mask).amax(1)
    for row in range(len(piece)):
        for column in range(laid.shape[1]):
            if column < last[row]:
                place = packing.places(torch.tensor([row]), torch.tensor([column]))[0]
                assert torch.equal(laid[row, column], values[place])
                assert packing.ids[place] == piece.input_ids[row, column] and packing.columns[place] == column
            else:
                assert not laid[row, column].any()
    assert torch.equal(packing.take(laid), values)


def test_windows_of_attention_are_not_packed_where_they_are_narrower_than_the_responses():
    model = make_model("gemma3", dtype=torch.float64, attention="sdpa")
    _, piece = micro_batches(make_batch(), 6, by_group=True)[0]  # 15 columns
    with TrueFloat64():
        for window in (14, 16):
            model.config.sliding_window = window
            assert (packing_for(model, piece) is not None) == (window == 16)
            found = together(model, make_batch(), 6)
            torch.testing.assert_close(found, alone(model, make_rows()), rtol=1e-10, atol=1e-11)


class Shifted(nn.Module):
    """Mixes each token with the one before it, outside attention."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, states: Tensor) -> Tensor:
        return self.inner(states + torch.nn.functional.pad(states, (0, 0, 1, 0))[:, :-1])


def test_a_model_that_mixes_tokens_outside_attention_is_found_out():
    model = make_model("llama", dtype=torch.float64, attention="sdpa")
    assert can_pack(model)
    mixing = copy.deepcopy(model)
    mixing.model.layers[1].mlp = Shifted(mixing.model.layers[1].mlp)
    assert not can_pack(mixing)
    with TrueFloat64():
        torch.testing.assert_close(
            together(mixing, make_batch(), 6), alone(mixing, make_rows()), rtol=1e-10, atol=1e-11
        )


def test_models_that_compute_otherwise_or_cannot_be_judged_are_not_packed():
    with without_packing():
        assert not can_pack(make_model("llama", attention="eager"))
    assert not can_pack(make_model("llama", dtype=torch.bfloat16, attention="sdpa"))
    frugal = make_model("llama", attention="sdpa")
    frugal.gradient_checkpointing_enable({"use_reentrant": False})
    assert not can_pack(frugal)

    class Wrapped(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    assert not can_pack(Wrapped(make_model("llama", attention="sdpa")))


def test_attention_is_the_usual_one_afterwards_also_when_the_model_fails(monkeypatch):
    model = make_model("qwen2", attention="sdpa")
    _, piece = micro_batches(make_batch(), 6, by_group=True)[0]
    ids = torch.arange(4, 20)[None]
    before = model(input_ids=ids).logits
    kept_logprobs(model, piece)
    assert torch.equal(model(input_ids=ids).logits, before)

    def fails(*_):
        raise ValueError("broken")

    hook = model.lm_head.register_forward_hook(fails)
    with pytest.raises(ValueError):
        kept_logprobs(model, piece)
    hook.remove()
    assert torch.equal(model(input_ids=ids).logits, before)
