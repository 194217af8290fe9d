"""Squared norms of token gradients scaled entry by entry, as by an optimizer's preconditioner.

For a linear layer's gradient G = Σ_s δ_s a_sᵀ, ‖G ∘ D‖² has no shared factor as ‖G‖² does, so every token's G is
formed, a few tokens at a time, and multiplied by D.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gradscope.policy import flat_slices

AT_ONCE = {"cpu": 1 << 19, "cuda": 1 << 24}
"""Entries of token gradients formed at a time, by device. cpu: the fastest of 2¹⁹, 2²¹ and 2²³ at M in the
benchmarks. cuda: an H200 took 65 ms per token at 0.5 B with 2¹⁹, 11 with 2²⁴ (6 without a metric)."""


class Metric:
    """D for every measured parameter of a model; scale: flat, in the order of `float_parameters`."""

    def __init__(self, model: nn.Module, scale: Float[Tensor, " P"]) -> None:
        parameters = {name: model.get_parameter(name) for name in flat_slices(model)}
        self._scales = {
            id(p): scale[part].view(p.shape).to(p.device)
            for p, part in zip(parameters.values(), flat_slices(model).values(), strict=True)
        }

    def of(self, parameter: Tensor) -> Tensor:
        """Return D of one parameter, in its shape."""
        return self._scales[id(parameter)]

    def linear(
        self, module: nn.Module, delta: Float[Tensor, "B n K out"], inputs: Float[Tensor, "B n in"]
    ) -> Float[Tensor, "B K"]:
        """Return a linear module's scaled squared norms (weight, bias) from the gradient at its output [.., n, ..]."""
        weight = self._weight(module).to(delta)
        (batch, _, tokens, outputs), inner = delta.shape, inputs.shape[2]
        square = delta.new_zeros(batch, tokens)
        at_once = AT_ONCE.get(delta.device.type, AT_ONCE["cuda"])
        each = max(1, at_once // max(1, batch * outputs * inner))
        width = max(1, min(outputs, at_once // max(1, batch * inner)))
        for start in range(0, tokens, each):
            own = slice(start, min(start + each, tokens))
            for rows in torch.arange(outputs).split(width):
                part = slice(int(rows[0]), int(rows[-1]) + 1)
                gradient = delta[:, :, own, part].flatten(2).mT @ inputs
                gradient = gradient.view(batch, own.stop - own.start, -1, inner).mul_(weight[part])
                square[:, own] += torch.linalg.vector_norm(gradient.flatten(2), dim=2).square()
        return square if module.bias is None else square + self.vector(module.bias, delta.sum(1))

    def at_one_position(
        self, module: nn.Module, delta: Float[Tensor, "*m out"], inputs: Float[Tensor, "*m in"]
    ) -> Float[Tensor, " *m"]:
        """Return the same for tokens with one position each: Σ_oi (D_oi δ_o a_i)²."""
        square = ((delta.square() @ self._weight(module).to(delta).square()) * inputs.square()).sum(-1)
        return square if module.bias is None else square + self.vector(module.bias, delta)

    def vector(self, parameter: Tensor, gradient: Float[Tensor, "*m d"]) -> Float[Tensor, " *m"]:
        """Return the scaled squared norm of a vector parameter's gradient."""
        return (gradient * self.of(parameter).to(gradient)).square().sum(-1)

    def _weight(self, module: nn.Module) -> Float[Tensor, "out in"]:
        """Return D of the weight in nn.Linear's layout; a Conv1D's is transposed."""
        weight = self.of(module.weight)
        return weight if isinstance(module, nn.Linear) else weight.T
