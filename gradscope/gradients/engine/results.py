"""Results of the engine, and the tolerances of its self-check."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from gradscope.objective import TokenStatistics


@dataclass(frozen=True)
class TokenGradients:
    """The engine's results for m response tokens of one sequence; L2 norms of log π's gradient, unweighted.

    Everything is NaN where it was not asked for.
    """

    statistics: TokenStatistics
    """log π, log(1−π) and entropy at the temperature, [m] each."""
    logit_grad_norm: Float[Tensor, " m"]
    """‖∂ log π / ∂(logits / T)‖ = ‖e − π‖."""
    act_grad_norm: Float[Tensor, "m layers"]
    """‖δ_ℓ‖ over all positions, ℓ = 0 (input of the first block) … L (output of the last)."""
    param_grad_norm: Float[Tensor, " m"]
    """‖g‖ over all parameters, shared ones once."""
    module_grad_norm: dict[str, Float[Tensor, " m"]]
    """‖g‖ of each module's own parameters; a table that the head shares counts under the embedding's name."""
    scaled_grad_norm: Float[Tensor, " m"] | None = None
    """‖g ∘ D‖ in the engine's metric D; None without one."""


@dataclass(frozen=True)
class Measured:
    """A body's results for K tokens of each of B sequences."""

    layers: Float[Tensor, "B K layers"]
    """‖δ_ℓ‖ for ℓ = 0 … L − 1."""
    squares: dict[str, Float[Tensor, "B K"]]
    """Squared gradient norms by module."""
    scaled: Float[Tensor, "B K"] | None
    """Squared norm of the scaled gradient over these modules; None without a metric."""


TOLERANCES = {torch.float64: 1e-4, torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 0.05}
"""Largest relative difference of a norm that rounding explains, by dtype: float64 allows for the float32 casts inside
transformers' modules; half precisions round every product of a long chain, and prefixes of another length otherwise."""


FAST_TOLERANCES = {"bfloat16": 0.05, "tf32": 0.01}
"""The same for products whose factors are rounded to 8 or 11 bits."""


FLOOR = 1e-30
"""Norms below this count as this: float32 has no digits left there."""


@dataclass(frozen=True)
class SelfCheck:
    """Difference between the engine and plain autograd on the compared tokens."""

    tokens: int
    largest_difference: float
    """Relative, over every layer and the norm of all parameters."""
    tolerance: float
