"""Log-probabilities without cancellation, against sums in plain Python floats and autograd in float64."""

import math

import pytest
import torch
from support.refusals import refused
from torch import Tensor

from gradscope.objective import gather_logprobs, logit_gradient
from gradscope.objective.logprobs import (
    ARGMAX_PART,
    token_statistics,
)

# Token 0 at gaps that make 1 − π about .5, 1e-3, 1e-7, 1e-12 and 1e-26, a flat row, one with an impossible token.
ROWS = [
    [0.0, 0.0, -9.0, -11.0, -10.0],
    [7.0, -1.0, -2.0, 0.0, -3.0],
    [16.0, -1.0, 0.5, -4.0, -2.0],
    [28.0, -1.0, 0.5, -4.0, -2.0],
    [60.0, -1.0, 0.5, -4.0, -2.0],
    [1.0, 1.0, 1.0, 1.0, 1.0],
    [2.0, -math.inf, 1.0, -0.5, 0.25],
]


def log_share(part: float, rest: float) -> float:
    """log(part / (part + rest)) from whichever of the two is smaller, so that nothing cancels."""
    return math.log(part / (part + rest)) if part < rest else math.log1p(-rest / (part + rest))


def statistics_by_loop(logits: list[float], token: int, temperature: float) -> tuple[float, float, float]:
    """log π, log(1−π) and entropy of one token, summed exactly in Python floats."""
    exps = [math.exp((logit - max(logits)) / temperature) for logit in logits]
    rests = [math.fsum(exps[:j] + exps[j + 1 :]) for j in range(len(exps))]
    terms = [-e / (e + rest) * log_share(e, rest) for e, rest in zip(exps, rests, strict=True) if e > 0]
    return log_share(exps[token], rests[token]), log_share(rests[token], exps[token]), math.fsum(terms)


def every_token() -> tuple[Tensor, Tensor]:
    """Each of ROWS once per possible token: logits [n, 5] in float64 and token ids [n]."""
    pairs = [(row, token) for row in ROWS for token in range(5) if row[token] > -math.inf]
    return torch.tensor([row for row, _ in pairs], dtype=torch.float64), torch.tensor([token for _, token in pairs])


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.5])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-6)])
def test_statistics_equal_exact_sums_for_every_token(temperature, dtype, tolerance):
    logits, token_ids = every_token()
    stats = token_statistics(logits.to(dtype), token_ids, temperature=temperature)
    assert stats.logprob.dtype == stats.log_one_minus_prob.dtype == stats.entropy.dtype == dtype
    for i, (row, token) in enumerate(zip(logits.tolist(), token_ids.tolist(), strict=True)):
        measured = stats.logprob[i], stats.log_one_minus_prob[i], stats.entropy[i]
        for actual, expected in zip(measured, statistics_by_loop(row, token, temperature), strict=True):
            # Relative, also where log π is −1e-26: nothing cancels. Below 1 the number is itself a probability or a sum
            # of some, exp(z) of a rounded z down to −90, whose relative error is ε·|z|: hence the factor.
            rel = tolerance if abs(expected) > 1 else 20 * tolerance
            assert actual.item() == pytest.approx(expected, rel=rel, abs=0)


@pytest.mark.parametrize("vocab", [4 * ARGMAX_PART - 1, 4 * ARGMAX_PART, 4 * ARGMAX_PART + 1, 5 * ARGMAX_PART + 63])
def test_statistics_of_a_vocabulary_that_is_searched_in_parts_equal_exact_sums(vocab):
    draw = torch.Generator().manual_seed(vocab)
    logits = torch.randn(8, vocab, generator=draw, dtype=torch.float64)
    for row, place in enumerate((0, 63, 64, 200, vocab - 1)):
        logits[row, place] = 30.0  # the largest by far, at an edge of a part
    logits[5, [3, 70, vocab - 1]] = 5.0  # three largest ones
    logits[6, : vocab - 3] = -math.inf  # three possible tokens
    token_ids = logits.argmax(-1)
    stats = token_statistics(logits, token_ids)
    for i, (row, token) in enumerate(zip(logits.tolist(), token_ids.tolist(), strict=True)):
        measured = stats.logprob[i], stats.log_one_minus_prob[i], stats.entropy[i]
        for actual, expected in zip(measured, statistics_by_loop(row, token, 1.0), strict=True):
            assert actual.item() == pytest.approx(expected, rel=1e-12)


def test_float32_log_one_minus_prob_is_finite_where_the_probability_rounds_to_one():
    stats = token_statistics(torch.tensor([0.0, 200.0]), torch.tensor(1))
    assert stats.log_one_minus_prob.item() == -200.0
    assert stats.logprob.item() == 0.0


def test_a_token_that_alone_is_possible_has_no_entropy_and_no_rest():
    stats = token_statistics(torch.tensor([-math.inf, 3.0, -math.inf]), torch.tensor(1))
    assert (stats.logprob.item(), stats.log_one_minus_prob.item(), stats.entropy.item()) == (0.0, -math.inf, 0.0)


def test_an_impossible_token_has_log_probability_minus_infinity_and_a_whole_rest():
    stats = token_statistics(torch.tensor([-math.inf, 0.0, 0.0]), torch.tensor(0))
    assert (stats.logprob.item(), stats.log_one_minus_prob.item()) == (-math.inf, 0.0)
    assert stats.entropy.item() == pytest.approx(math.log(2))


def test_statistics_leave_the_logits_as_they_were_and_pass_no_gradient():
    logits = torch.randn(2, 3, 9, generator=torch.Generator().manual_seed(0)).requires_grad_()
    before = logits.detach().clone()
    stats = token_statistics(logits, torch.zeros(2, 3, dtype=torch.long))
    gradient = logit_gradient(logits, torch.zeros(2, 3, dtype=torch.long))
    gather_logprobs(logits, torch.zeros(2, 3, dtype=torch.long))
    assert torch.equal(logits.detach(), before)
    assert not stats.logprob.requires_grad
    assert not gradient.requires_grad


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 2e-5)])
def test_the_logit_gradient_is_one_hot_minus_probabilities_to_relative_precision(temperature, dtype, tolerance):
    # float32: relative error ε·|log π_j| with |log π_j| up to 90.
    logits, token_ids = every_token()
    gradient = logit_gradient(logits.to(dtype), token_ids, temperature=temperature)
    for i, (row, token) in enumerate(zip(logits.tolist(), token_ids.tolist(), strict=True)):
        exps = [math.exp((logit - max(row)) / temperature) for logit in row]
        for j, e in enumerate(exps):
            others = math.fsum(x for k, x in enumerate(exps) if k != token)
            expected = (others if j == token else -e) / math.fsum(exps)
            assert gradient[i, j].item() == pytest.approx(expected, rel=tolerance, abs=0)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 2e-5)])
def test_the_gradient_of_gathered_logprobs_is_the_uncancelled_one(temperature, dtype, tolerance):
    logits, token_ids = every_token()
    leaf = logits.to(dtype).requires_grad_()
    logprobs = gather_logprobs(leaf, token_ids, temperature=temperature)
    logprobs.sum().backward()
    exact = logit_gradient(logits, token_ids, temperature=temperature) / temperature
    assert torch.allclose(leaf.grad.double(), exact, rtol=tolerance, atol=0)
    expected = token_statistics(logits, token_ids, temperature=temperature).logprob
    assert torch.allclose(logprobs.double(), expected, rtol=tolerance, atol=0)


# torch itself calls torch.jit.script the first time that forward mode is used.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_gathered_logprobs_are_differentiable_twice_and_in_forward_mode():
    logits = torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()
    token_ids = torch.tensor([0, 3, 5])

    def function(x):
        return gather_logprobs(x, token_ids, temperature=0.7)

    assert torch.autograd.gradcheck(function, logits)
    assert torch.autograd.gradgradcheck(function, logits)
    direction = torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    _, change = torch.func.jvp(function, (logits.detach(),), (direction,))
    expected = (logit_gradient(logits, token_ids, temperature=0.7) / 0.7 * direction).sum(-1)
    assert torch.allclose(change, expected, rtol=1e-12)


def test_a_temperature_per_row_equals_one_call_per_row():
    logits = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(3))
    token_ids = torch.arange(8).reshape(2, 4)
    together = gather_logprobs(logits, token_ids, temperature=torch.tensor([[0.7], [1.3]]))
    for row, temperature in enumerate((0.7, 1.3)):
        alone = gather_logprobs(logits[row], token_ids[row], temperature=temperature)
        assert torch.allclose(together[row], alone, rtol=1e-6, atol=0)  # 0.7 as float32 and as float64 differ


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan])
def test_a_temperature_that_is_not_positive_is_refused(temperature):
    logits, token_ids = torch.zeros(2, 3), torch.zeros(2, dtype=torch.long)
    for function in (token_statistics, logit_gradient, gather_logprobs):
        with refused("temperature"):
            function(logits, token_ids, temperature=temperature)
    with refused("temperature"):
        gather_logprobs(logits, token_ids, temperature=torch.tensor([1.0, temperature]))
