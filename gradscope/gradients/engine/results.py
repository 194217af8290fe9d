"""Results of the engine, and the tolerances of its self-check."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from gradscope.objective import TokenStatistics


@dataclass(frozen=True)
class TokenGradients:
    """Unweighted L2 norms of ∇ log π, or of another quantity's gradient, for m response tokens of one sequence; NaN
    where not requested."""

    statistics: TokenStatistics
    """log π, log(1−π) and entropy at the temperature, [m] each."""
    logit_grad_norm: Float[Tensor, " m"]
    """‖∂ log π / ∂(logits / T)‖ = ‖e − π‖."""
    act_grad_norm: Float[Tensor, "m layers"]
    """‖δ_ℓ‖ over all positions, ℓ = 0 (input of the first block) … L (output of the last)."""
    param_grad_norm: Float[Tensor, " m"]
    """‖g‖ over all parameters, counting shared ones once."""
    module_grad_norm: dict[str, Float[Tensor, " m"]]
    """‖g‖ by module, over its own parameters; a tied table counts under the embedding's name."""
    scaled_grad_norm: Float[Tensor, " m"] | None = None
    """‖g ∘ D‖ in the engine's metric D; None without a metric."""


@dataclass(frozen=True)
class ChunkNorms:
    """A body's results for K tokens of each of B sequences."""

    layers: Float[Tensor, "B K layers"]
    """‖δ_ℓ‖ for ℓ = 0 … L − 1."""
    squares: dict[str, Float[Tensor, "B K"]]
    """Squared gradient norms by module."""
    scaled: Float[Tensor, "B K"] | None
    """Squared norm of the scaled gradient over these modules; None without a metric."""


TOLERANCES = {torch.float64: 1e-4, torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 0.05}
"""Largest relative difference of a norm explained by rounding, by dtype. float64 allows for float32 casts inside
transformers' modules; half precisions round every product of a long chain, differently for other prefix lengths."""


FAST_TOLERANCES = {"bfloat16": 0.05, "tf32": 0.01}
"""The same for products with factors rounded to 8 or 11 bits."""


FLOOR = 1e-30
"""Lower bound on norms in comparisons: float32 has no digits left below it."""


@dataclass(frozen=True)
class SelfCheck:
    """Difference between the engine and plain autograd on the compared tokens."""

    tokens: int
    largest_difference: float
    """Largest relative difference, over every layer and the norm over all parameters."""
    tolerance: float
