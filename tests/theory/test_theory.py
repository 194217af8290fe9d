"""Proposition 4.2: the closed form of ‖e − π‖ and its bounds, against sums in plain Python and float64 autograd."""

import math

import pytest
import torch

from gradscope.theory import logit_grad_bounds, logit_grad_norm, rounding_tolerance
from gradscope.theory.bounds import check_logit_bounds


def norm_by_loop(probs: list[float], token: int) -> float:
    """√((Σ_{j≠o} π_j)² + Σ_{j≠o} π_j²), summed exactly, one probability at a time."""
    others = [p for j, p in enumerate(probs) if j != token]
    return math.sqrt(math.fsum(others) ** 2 + math.fsum(p * p for p in others))


def peaked(one_minus_prob: float, vocab: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Log-probabilities whose token 0 has probability 1 − one_minus_prob and whose rest falls off geometrically."""
    rest = torch.tensor([0.5**j for j in range(vocab - 1)], dtype=torch.float64)
    rest = rest / rest.sum() * one_minus_prob
    return torch.cat([torch.tensor([1 - one_minus_prob], dtype=torch.float64), rest]).log().to(dtype)


def log_rest(logprobs_all: torch.Tensor, token: int) -> torch.Tensor:
    """log(1−π) as the log of the sum of all other probabilities."""
    return torch.cat([logprobs_all[..., :token], logprobs_all[..., token + 1 :]], -1).logsumexp(-1)


@pytest.mark.parametrize("one_minus_prob", [0.9, 0.3, 1e-3, 1e-6, 1e-9, 1e-12])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 4e-6)])
def test_the_norm_keeps_its_digits_down_to_one_minus_prob_of_1e_12(one_minus_prob, dtype, tolerance):
    # The float32 tolerance is ε·|log π_j| for the smallest π_j that counts (about e^-33): the inputs carry no more.
    logprobs = peaked(one_minus_prob, vocab=12)
    expected = norm_by_loop(logprobs.exp().tolist(), 0)
    norm = logit_grad_norm(logprobs.to(dtype), torch.tensor(0))
    assert norm.dtype == dtype
    assert norm.item() == pytest.approx(expected, rel=tolerance)


def test_the_norm_equals_autograds_for_every_token_and_any_leading_shape():
    logits = torch.randn(2, 3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    token_ids = torch.arange(6).reshape(2, 3)
    norms = logit_grad_norm(logits.log_softmax(-1), token_ids)
    for i in range(2):
        for j in range(3):
            row = logits[i, j].clone().requires_grad_()
            row.log_softmax(-1)[token_ids[i, j]].backward()
            assert norms[i, j].item() == pytest.approx(row.grad.norm().item(), rel=1e-12)


def test_the_norm_survives_probabilities_whose_squares_are_zero_in_float32():
    logprobs = torch.tensor([0.0, -70.0, -70.0])  # e^-70 = 4e-31, its square underflows
    assert logit_grad_norm(logprobs, torch.tensor(0)).item() == pytest.approx(math.exp(-70) * math.sqrt(6), rel=1e-5)


def test_a_certain_token_has_norm_zero_and_an_impossible_one_at_least_one():
    logprobs = torch.tensor([0.0, -math.inf, -math.inf])
    assert logit_grad_norm(logprobs, torch.tensor(0)).item() == 0.0
    assert logit_grad_norm(logprobs, torch.tensor(1)).item() == pytest.approx(math.sqrt(2))


@pytest.mark.parametrize("vocab", [2, 3, 64, 1000])
def test_the_lower_bound_is_reached_by_the_uniform_distribution(vocab):
    logprobs = torch.full((vocab,), -math.log(vocab), dtype=torch.float64)
    lower, _ = logit_grad_bounds(log_rest(logprobs, 0), vocab)
    assert logit_grad_norm(logprobs, torch.tensor(0)).item() == pytest.approx(lower.item(), rel=1e-12)
    assert lower.item() == pytest.approx(math.sqrt((vocab - 1) / vocab), rel=1e-12)  # √(1 − 2/N + 1/N)


@pytest.mark.parametrize("one_minus_prob", [0.999, 0.5, 1e-3, 1e-12])
def test_the_upper_bound_is_reached_when_two_tokens_share_everything(one_minus_prob):
    probs = torch.tensor([1 - one_minus_prob, one_minus_prob, 0.0, 0.0], dtype=torch.float64)
    _, upper = logit_grad_bounds(probs[1].log(), 4)
    assert logit_grad_norm(probs.log(), torch.tensor(0)).item() == pytest.approx(upper.item(), rel=1e-12)
    assert upper.item() == pytest.approx(math.sqrt(2) * one_minus_prob, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_no_distribution_breaks_the_bounds_beyond_rounding(dtype):
    # Sharp, flat, uniform and two-point rows, where a bound is reached and rounding alone decides.
    generator = torch.Generator().manual_seed(1)
    sharpness = torch.logspace(-2, 2, 400, dtype=torch.float64).unsqueeze(-1)
    random = torch.randn(400, 50, dtype=torch.float64, generator=generator) * sharpness
    uniform = torch.zeros(1, 50, dtype=torch.float64)
    two_point = torch.full((40, 50), -math.inf, dtype=torch.float64)
    two_point[:, 0], two_point[:, 1] = 0.0, -torch.linspace(0.0, 28.0, 40, dtype=torch.float64)
    logprobs = torch.cat([random, uniform, two_point]).to(dtype).log_softmax(-1)
    for token in (0, 1):
        token_ids = torch.full((len(logprobs),), token)
        check = check_logit_bounds(logit_grad_norm(logprobs, token_ids), log_rest(logprobs, token), 50)
        assert check.held, check
        assert check.num_tokens == 441
        assert check.tolerance < 100 * 4 * torch.finfo(dtype).eps


def test_the_granted_slack_is_rounding_and_stays_finite_where_a_token_is_certain():
    slack = rounding_tolerance(torch.tensor([0.0, -10.0, -math.inf]))
    assert slack.tolist() == pytest.approx([4 * 1.1920929e-7 * f for f in (8.0, 18.0, 8.0 + 87.33655)], rel=1e-5)
    assert check_logit_bounds(torch.tensor(0.0), torch.tensor(-math.inf), 10).held
