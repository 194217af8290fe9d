"""When two measurements of token gradients count as the same."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from gradscope.gradients.engine.results import TokenGradients
from gradscope.policy import Policy
from support.policies import VOCAB, make_policy

TRUE_FLOAT64 = 1e-10
"""Both sides in float64 all through: some thousand roundings of 1e-16, and what cancels in them."""


ROUNDINGS = 1600
"""One after another on the longest way through a tiny model and back: in each of 3 layers, twice, sums over 32 of a
norm, 32 + 32 of attention's projections, 20 positions, 32 + 48 of the MLP and 32 of a norm; the vocabulary; tokens."""
FLOAT32_GRADIENT = 4 * ROUNDINGS**0.5 * 2**-24
"""Relative error of a gradient in float32 on any processor: λ √n u, which random roundings exceed with a probability of
2 exp(−λ²/2) (Higham & Mary 2019, Theorem 2.4), here with λ = 4; 1e-5. Two programs' gradients differ by twice that."""

FLOAT32 = 1e-4
"""A logit of 60 is rounded by 4e-6 in float32, and 1 − π with it; then a few layers."""


def sum_rounding(whole: dict[str, Tensor], *parts: dict[str, Tensor]) -> float:
    """How far, over its norm, a gradient in float32 may be from the sum of such parts: each errs by its own norm."""
    norms = [sum(float(g.double().square().sum()) for g in one.values()) ** 0.5 for one in (whole, *parts)]
    return FLOAT32_GRADIENT * sum(norms) / norms[0]


@functools.cache
def cached_policy(name: str) -> Policy:
    return make_policy(name, torch.float64)


def random_ids(length: int, vocab: int = VOCAB, seed: int = 0) -> Tensor:
    return torch.randint(4, vocab, (length,), generator=torch.Generator().manual_seed(seed))


def assert_same(a: TokenGradients, b: TokenGradients, tolerance: float = 1e-10) -> None:
    """Every number, NaN where the other has NaN; a module's norm counts by its part in the whole."""
    close = {"rtol": tolerance, "atol": 0.0, "equal_nan": True}
    for field in ("logprob", "log_one_minus_prob", "entropy"):
        torch.testing.assert_close(
            getattr(a.statistics, field), getattr(b.statistics, field), rtol=tolerance, atol=1e-12
        )
    torch.testing.assert_close(a.logit_grad_norm, b.logit_grad_norm, **close)
    torch.testing.assert_close(a.act_grad_norm, b.act_grad_norm, **close)
    torch.testing.assert_close(a.param_grad_norm, b.param_grad_norm, **close)
    assert a.module_grad_norm.keys() == b.module_grad_norm.keys()
    for name, norms in a.module_grad_norm.items():
        shares = norms / a.param_grad_norm, b.module_grad_norm[name] / b.param_grad_norm
        torch.testing.assert_close(*shares, rtol=0.0, atol=tolerance, equal_nan=True)
