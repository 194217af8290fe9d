"""Each rule against the gradient that autograd forms in float64, one token at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.pytorch_utils import Conv1D

from gradscope.gradients.engine.norms import (
    diagonal_square_norms,
    embedding_square_norms,
    linear_square_norms,
    outer_square_norms,
    prefix_factor,
    tied_cross_terms,
)
from gradscope.gradients.engine.ownership import parameter_slopes

TOKENS = 4
CASTS = 1e-6
"""transformers' norms compute in float32 even on float64 inputs."""


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def square_norms_by_autograd(module: nn.Module, calls: list[tuple[Tensor, Tensor]]) -> Tensor:
    """‖g‖² [K] of all parameters; calls: (input, delta [K, *output]) of each time the module was called."""
    norms = []
    for k in range(len(calls[0][1])):
        score = sum((module(a) * delta[k]).sum() for a, delta in calls)
        gradients = torch.autograd.grad(score, list(module.parameters()))
        norms.append(sum(g.square().sum() for g in gradients))
    return torch.stack(norms).detach()


def of_one(delta: Tensor, factor: Tensor) -> Tensor:
    """Of one sequence: delta [K, n, out], factor [n, r]."""
    return linear_square_norms(delta.transpose(0, 1)[None], factor[None])[0]


@pytest.mark.parametrize("n, d", [(1, 5), (7, 30), (30, 30), (59, 30), (60, 30), (95, 30)])
@pytest.mark.parametrize("kind, bias", [("linear", False), ("linear", True), ("conv1d", True)])
def test_a_linear_module_has_the_norm_of_its_weight_and_bias_together(kind, bias, n, d):
    module = (nn.Linear(d, 6, bias=bias) if kind == "linear" else Conv1D(6, d)).double()
    inputs, delta = random(n, d), random(TOKENS, n, 6, seed=1)
    ours = of_one(delta, prefix_factor(inputs, bias=bias))
    torch.testing.assert_close(ours, square_norms_by_autograd(module, [(inputs, delta)]), rtol=1e-12, atol=0.0)


def test_the_calls_of_one_linear_module_add_up_before_the_norm():
    module = nn.Linear(8, 6).double()
    calls = [(random(n, 8, seed=n), random(TOKENS, n, 6, seed=n + 1)) for n in (3, 9, 5)]
    factor = prefix_factor(torch.cat([a for a, _ in calls]), bias=True)
    ours = of_one(torch.cat([delta for _, delta in calls], 1), factor)
    torch.testing.assert_close(ours, square_norms_by_autograd(module, calls), rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("n, d", [(5, 20), (20, 20), (39, 20), (70, 20)])
def test_the_first_rows_of_a_triangular_factor_are_the_factor_of_the_prefix(n, d):
    inputs = random(n, d)
    factor = prefix_factor(inputs, bias=False)
    torch.testing.assert_close(factor @ factor.T, inputs @ inputs.T)
    for m in range(1, n + 1):
        part = factor[:m, : min(m, factor.shape[1])]
        torch.testing.assert_close(part @ part.T, inputs[:m] @ inputs[:m].T)


def test_a_factor_keeps_the_digits_that_cancel_in_a_gram_matrix():
    # Two nearly equal inputs with opposite gradients: what is left of Σ δ aᵀ is a millionth of its terms.
    inputs = random(1, 50).repeat(2, 1)
    inputs[1] += 1e-6 * random(50, seed=2)
    delta = torch.tensor([[[1.0], [-1.0]]], dtype=torch.float64)
    expected = (inputs[0] - inputs[1]).square().sum()
    ours = of_one(delta, prefix_factor(inputs, bias=False))[0]
    assert ours.item() == pytest.approx(expected.item(), rel=1e-8)


@pytest.mark.parametrize("bias", [False, True])
def test_one_position_a_token_needs_only_two_norms(bias):
    module = nn.Linear(5, 6, bias=bias).double()
    inputs, delta = random(TOKENS, 5), random(TOKENS, 6, seed=1)
    expected = [
        square_norms_by_autograd(module, [(a[None], d[None, None])]) for a, d in zip(inputs, delta, strict=True)
    ]
    torch.testing.assert_close(outer_square_norms(delta, inputs, bias=bias), torch.cat(expected), rtol=1e-12, atol=0.0)


class Scale(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x.sin() + 2 * self.shift


DIAGONAL = {
    "LayerNorm": lambda: nn.LayerNorm(6),
    "LayerNorm without bias": lambda: nn.LayerNorm(6, bias=False),
    "torch's RMSNorm": lambda: nn.RMSNorm(6),
    "RMSNorm": lambda: LlamaRMSNorm(6),
    "RMSNorm with 1 + w": lambda: Gemma2RMSNorm(6),
    "scale and shift of one's own": lambda: Scale(6),
}


@pytest.mark.parametrize("shape", [(1, 9), (1, 9, 4), (1, 4, 9)], ids=["hidden", "heads last", "heads first"])
@pytest.mark.parametrize("kind", DIAGONAL)
def test_a_diagonal_module_sums_over_everything_but_its_channels(kind, shape):
    module = DIAGONAL[kind]().double()
    with torch.no_grad():
        for p in module.parameters():
            p += 0.3 * random(*p.shape, seed=4)
    inputs, delta = random(*shape, 6), random(TOKENS, *shape, 6, seed=1)
    with torch.no_grad():
        slopes = list(parameter_slopes(module, inputs))
    assert len(slopes) == len(list(module.parameters()))
    ours = sum(diagonal_square_norms(delta, slope) for slope in slopes)
    torch.testing.assert_close(ours, square_norms_by_autograd(module, [(inputs, delta)]), rtol=CASTS, atol=0.0)


def test_a_diagonal_module_whose_tokens_have_inputs_of_their_own():
    module = nn.LayerNorm(6).double()
    inputs, delta = random(TOKENS, 3, 6), random(TOKENS, 3, 6, seed=1)
    with torch.no_grad():
        ours = sum(diagonal_square_norms(delta, slope) for slope in parameter_slopes(module, inputs))
    expected = [square_norms_by_autograd(module, [(a, d[None])]) for a, d in zip(inputs, delta, strict=True)]
    torch.testing.assert_close(ours, torch.cat(expected), rtol=1e-12, atol=0.0)


@pytest.mark.parametrize(
    "ids", [[[3, 1, 4]], [[5, 5, 5, 5]], [[1, 2, 1, 2, 1]], [[1, 2, 2], [2, 1, 0], [2, 2, 2]]], ids=str
)
def test_an_embedding_sums_what_flows_back_to_each_id_of_a_sequence(ids):
    table, ids = nn.Embedding(7, 6).double(), torch.tensor(ids)
    delta = random(len(ids), TOKENS, ids.shape[1], 6)
    expected = [square_norms_by_autograd(table, [(row, of_row)]) for row, of_row in zip(ids, delta, strict=True)]
    ours = embedding_square_norms(delta.transpose(1, 2), ids)
    torch.testing.assert_close(ours, torch.stack(expected), rtol=1e-12, atol=0.0)


def test_a_tied_table_has_both_squares_and_twice_their_product():
    table, ids = random(7, 6).requires_grad_(True), torch.tensor([[2, 5, 2, 0], [5, 5, 1, 2]])
    delta, head_delta = random(2, TOKENS, 4, 6), random(2, TOKENS, 7, seed=1)
    head_input = random(2, TOKENS, 6, seed=2)
    flowing = delta.transpose(1, 2)
    ours = (
        embedding_square_norms(flowing, ids)
        + outer_square_norms(head_delta, head_input, bias=False)
        + tied_cross_terms(flowing, ids, head_delta, head_input)
    )
    for b, k in ((b, k) for b in range(2) for k in range(TOKENS)):
        score = (functional.embedding(ids[b], table) * delta[b, k]).sum()
        score = score + (head_input[b, k] @ table.T) @ head_delta[b, k]
        expected = torch.autograd.grad(score, table)[0].square().sum()
        torch.testing.assert_close(ours[b, k], expected, rtol=1e-12, atol=0.0)
