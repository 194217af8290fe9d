"""What the token viewer can shade tokens by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Quantity:
    """A column of the token table to shade tokens by."""

    column: str
    label: str
    scale: Literal["linear", "log", "diverging", "ranked"] = "linear"
    """diverging: symmetric around 0; ranked: so, too, by the rank of the size among all tokens, largest marked."""
    unit: str = ""
    definition: str = ""
    reverse: bool = False
    """Shade small values most instead of large ones; for linear and log."""
    limits: tuple[int | float, int | float] | None = None
    """Ends of the scale; None: from the table."""
    missing: str = "not measured"
    """Text for tokens whose value is NaN."""


QUANTITIES = (
    Quantity(
        "gradient_percent", "share of the gradient", "ranked", "%",
        definition="This token's part of the batch's summed gradient, w⟨g, G⟩/‖G‖², in percent: with the update, or "
        "against it. Shares of all tokens add up to 100 %.",
    ),
    Quantity(
        "own_percent", "of it with its own prompt", "ranked", "%",
        definition="The part of that share which is a product with its own prompt's tokens, itself among them.",
    ),
    Quantity(
        "prob", "probability π", reverse=True, limits=(0.0, 1.0),
        definition="Probability of the sampled token at the sampling temperature. Improbable tokens are shaded.",
    ),
    Quantity(
        "param_grad_norm", "gradient norm ‖g‖", "log",
        definition="L2 norm of the gradient of this token's log π with respect to all parameters, or to those of "
        "an adapter that is measured alone, with weight 1.",
    ),
    Quantity(
        "weighted_norm", "size of its term |w|·‖g‖", "log",
        definition="The gradient norm times |w|, the magnitude of the factor on this token's ∇ log π in the loss, "
        "without the 1/num_tokens of the mean.",
    ),
    Quantity(
        "squared_share", "share of the gradient energy", "log", "%",
        definition="This token's (|w|·‖g‖)² as a share of the sum over all measured tokens of the batch, in percent. "
        "Not a share of the summed gradient, in which tokens cancel.",
    ),
    Quantity(
        "delta_logprob", "Δ log π", "diverging", "nats",
        definition="Change of this token's log π from the step that this page describes.",
    ),
    Quantity("advantage", "advantage", "diverging", missing="unknown", definition="The advantage that the loss uses."),
    Quantity("entropy", "entropy", "linear", "nats", definition="Entropy of the distribution at this token."),
    Quantity(
        "logit_grad_norm", "norm at the logits", "log",
        definition="L2 norm of the gradient of this token's log π with respect to logits / T: between 1 and √2 times "
        "1 − π, by algebra.",
    ),
    Quantity("logprob", "log π", "linear", "nats", reverse=True, definition="Log-probability of the sampled token."),
)  # fmt: skip
"""Quantities that a viewer offers if the table has them."""
