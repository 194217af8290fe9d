"""log π and its gradient in one walk: against log_softmax and autograd in float64."""

from __future__ import annotations

import pytest
import torch
from support.policies import make_batch, make_policy
from torch import Tensor, nn

from gradscope.objective import logprobs, micro_batches
from gradscope.objective.batch_logprobs import loss_logprobs
from gradscope.objective.logprobs import trained_logprobs


def make_logits(rows: int = 23, vocab: int = 37) -> tuple[Tensor, Tensor, Tensor]:
    """Logits from flat to sharp, the likeliest token and others, several temperatures; all in float64."""
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, vocab, generator=draw, dtype=torch.float64) * torch.linspace(0.1, 8, rows)[:, None]
    ids = torch.randint(vocab, (rows,), generator=draw)
    ids[::3] = logits[::3].argmax(-1)
    return logits, ids, torch.linspace(0.5, 1.5, rows, dtype=torch.float64)


def expected(logits: Tensor, ids: Tensor, temperatures: Tensor, seeds: Tensor) -> tuple[Tensor, Tensor]:
    """log π and the gradient of Σ seed · log π, by autograd in float64."""
    leaf = logits.double().requires_grad_()
    logprobs = (leaf / temperatures.double()[:, None]).log_softmax(-1).gather(-1, ids[:, None])[:, 0]
    return logprobs.detach(), torch.autograd.grad(logprobs @ seeds.double(), leaf)[0]


def found(logits: Tensor, ids: Tensor, temperatures: Tensor, seeds: Tensor) -> tuple[Tensor, Tensor]:
    leaf = logits.clone().requires_grad_()
    logprobs = trained_logprobs(leaf, ids, temperatures)
    return logprobs.detach(), torch.autograd.grad(logprobs @ seeds.to(logprobs), leaf)[0]


@pytest.mark.parametrize("cached", [1, 100, 2**18])
def test_logprobs_and_gradients_are_those_of_log_softmax_however_many_rows_are_taken_at_once(cached, monkeypatch):
    monkeypatch.setattr(logprobs, "CACHED", cached)
    logits, ids, temperatures = make_logits()
    seeds = torch.linspace(-2, 3, len(ids), dtype=torch.float64)
    for dtype, tolerance in [(torch.float64, 1e-13), (torch.float32, 1e-5)]:  # of logits of size 10 to 20
        ours = found(logits.to(dtype), ids, temperatures.to(dtype), seeds)
        for mine, wanted in zip(ours, expected(logits.to(dtype), ids, temperatures.to(dtype), seeds), strict=True):
            torch.testing.assert_close(mine.double(), wanted, rtol=tolerance, atol=tolerance)
    assert ours[0].dtype == ours[1].dtype == torch.float32


def test_half_precision_logits_are_computed_in_float32_and_their_gradient_is_as_narrow_as_they_are():
    logits, ids, temperatures = make_logits()
    narrow, seeds = logits.bfloat16(), torch.ones(len(ids))
    logprobs, gradient = found(narrow, ids, temperatures.float(), seeds)
    wanted, slopes = expected(narrow, ids, temperatures, seeds)
    assert (logprobs.dtype, gradient.dtype) == (torch.float32, torch.bfloat16)
    torch.testing.assert_close(logprobs.double(), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient.double(), slopes, rtol=2**-8, atol=1e-6)  # rounded once, to eight bits


def test_the_gradient_does_not_cancel_where_the_token_is_all_but_certain():
    gaps = torch.tensor([10.0, 17.0, 25.0, 60.0], dtype=torch.float64)
    logits = torch.stack([gaps, torch.zeros_like(gaps), torch.zeros_like(gaps) - 1.0], -1)
    ids, ones = torch.zeros(4, dtype=torch.long), torch.ones(4)
    logprobs, gradient = found(logits.float(), ids, ones, ones)
    tail = (-gaps).exp() * (1 + torch.tensor(-1.0, dtype=torch.float64).exp())
    torch.testing.assert_close(logprobs.double(), -torch.log1p(tail), rtol=1e-5, atol=0)
    # 1 − π, to float32's digits of itself; log_softmax gives 0 from a gap of 17 on.
    torch.testing.assert_close(gradient[:, 0].double(), tail / (1 + tail), rtol=1e-5, atol=0)
    torch.testing.assert_close(gradient.sum(-1), torch.zeros(4), rtol=0, atol=1e-9)


def test_impossible_tokens_have_no_gradient_and_a_token_without_rivals_has_none_either():
    logits = torch.tensor([[1.0, -torch.inf, 0.0], [2.0, -torch.inf, -torch.inf]])
    ids, ones = torch.tensor([0, 0]), torch.ones(2)
    logprobs, gradient = found(logits, ids, ones, ones)
    share = 1 / (1 + torch.e)
    torch.testing.assert_close(logprobs.exp(), torch.tensor([1 - share, 1.0]))
    torch.testing.assert_close(gradient, torch.tensor([[share, 0.0, -share], [0.0, 0.0, 0.0]]))


def head_and_inputs(*, bias: bool) -> tuple[nn.Linear, Tensor, Tensor]:
    torch.manual_seed(0)
    return nn.Linear(8, 37, bias=bias), torch.randn(1, 5, 8, requires_grad=True), torch.arange(5)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_takes_the_place_of_a_products_logits_and_is_the_one_that_it_was(dtype, bias):
    head, hidden, ids = head_and_inputs(bias=bias)
    head, hidden = head.to(dtype), hidden.detach().to(dtype).requires_grad_(True)
    logits = head(hidden).flatten(0, 1)
    wanted = expected(logits.detach(), ids, torch.ones(5), torch.ones(5))[1].to(dtype)
    trained_logprobs(logits, ids, torch.ones(5)).sum().backward()
    torch.testing.assert_close(logits.detach(), wanted)
    torch.testing.assert_close(head.weight.grad, wanted.mT @ hidden.detach()[0])
    torch.testing.assert_close(hidden.grad[0], wanted @ head.weight.detach())
    if bias:
        torch.testing.assert_close(head.bias.grad, wanted.sum(0))


def test_a_policys_logits_give_their_place_away():
    policy, logits = make_policy("qwen2"), []
    batch = make_batch(policy)
    policy.model.lm_head.register_forward_hook(lambda _module, _args, output: logits.append(output))
    _, piece = micro_batches(batch, 4)[0]
    total = loss_logprobs(policy.model, piece).sum()
    before = logits[-1].detach().clone()
    total.backward()
    assert not torch.equal(logits[-1], before)


def test_a_second_backward_pass_is_an_error_where_the_first_took_the_logits():
    head, hidden, ids = head_and_inputs(bias=False)
    total = trained_logprobs(head(hidden).flatten(0, 1), ids, torch.ones(5)).sum()
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError):
        total.backward()
