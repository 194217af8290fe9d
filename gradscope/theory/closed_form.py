"""Proposition 4.2: the norm of the logit gradient in closed form, and both bounds.

The gradient of log π(o) with respect to the logits is e − π (e one-hot at the sampled token o), so over N tokens

    √(N/(N−1)) · (1−π) ≤ ‖e − π‖ ≤ √2 · (1−π),        ‖e − π‖² = (1−π)² + Σ_{j≠o} π_j²        (arXiv:2505.12929)

The textbook form 1 − 2π + Σ_j π_j² is equal but cancels to 0 in float32 near π = 1; the sum over the *other*
tokens never cancels. With a temperature T, "logits" means logits / T.
"""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gradscope.errors import InputError, checked
from gradscope.objective import widen


@checked
def logit_grad_norm(
    logprobs_all: Float[Tensor, "*tokens vocab"], token_ids: Int[Tensor, "*tokens"]
) -> Float[Tensor, "*tokens"]:
    """Return ‖e − π‖, the L2 norm of the gradient of log π(token) with respect to the logits, without cancellation.

    `logprobs_all` holds log π_j (nats) of the whole vocabulary; the sampled token's entry is not used. Float64 stays
    float64; narrower dtypes are computed and returned in float32. A token of probability 1 has norm 0.

    >>> round(logit_grad_norm(torch.tensor([0.5, 0.25, 0.25]).log(), torch.tensor(0)).item(), 6)  # √(½² + ¼² + ¼²)
    0.612372
    """
    others = widen(logprobs_all).scatter(-1, token_ids.unsqueeze(-1), -math.inf).exp()
    largest = others.amax(-1, keepdim=True)
    # Divide by the largest first: in float32, squares of probabilities below 1e-23 underflow.
    relative = others / largest.clamp_min(torch.finfo(others.dtype).tiny)
    return largest.squeeze(-1) * (relative.sum(-1).square() + relative.square().sum(-1)).sqrt()


@checked
def logit_grad_bounds(
    log_one_minus_prob: Float[Tensor, "*tokens"], vocab_size: int
) -> tuple[Float[Tensor, "*tokens"], Float[Tensor, "*tokens"]]:
    """Return the lower and upper bounds of Prop. 4.2 on ‖e − π‖, from log(1−π) in nats.

    The lower bound is attained if all other tokens are equally likely, the upper one if a single one has all the rest.

    >>> lower, upper = logit_grad_bounds(torch.tensor(0.5).log(), vocab_size=2)  # two tokens: both bounds meet
    >>> round(lower.item(), 6), round(upper.item(), 6)
    (0.707107, 0.707107)
    """
    if vocab_size < 2:
        raise InputError(f"vocab_size is {vocab_size}; the bounds need at least 2 tokens; pass the number of logits")
    one_minus_prob = widen(log_one_minus_prob).exp()
    return one_minus_prob * math.sqrt(vocab_size / (vocab_size - 1)), one_minus_prob * math.sqrt(2)


def rounding_tolerance(log_one_minus_prob: Float[Tensor, "*tokens"]) -> Float[Tensor, "*tokens"]:
    """Return the relative slack for rounding: 4 ε · (8 + |log(1−π)|), with the dtype's ε (float32: 1.2e-7).

    A rounded log x determines x only to ε·|log x|, so the slack grows with |log(1−π)|; the 8 is for the sums.
    """
    log_one_minus_prob = widen(log_one_minus_prob)
    info = torch.finfo(log_one_minus_prob.dtype)
    return 4 * info.eps * (8 - log_one_minus_prob.clamp(min=math.log(info.tiny), max=0.0))
