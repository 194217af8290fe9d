"""The backward pass of one block of a common decoder for K tokens of B sequences, with its gradient norms."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gradscope.gradients.engine.decoder.activations import BlockActivations
from gradscope.gradients.engine.decoder.parts import Matrix, Norm
from gradscope.gradients.engine.decoder.rules import (
    attention_backward,
    attention_backward_at,
    linear_backward,
    rms_norm_backward,
    rotary_backward,
)
from gradscope.gradients.engine.metric import Metric
from gradscope.gradients.engine.norms import Squares, linear_square_norms, outer_square_norms
from gradscope.gradients.engine.products import Product

Delta = Float[Tensor, "B n K d"]


class BlockBackward:
    """One block's backward pass over n positions of `batch` sequences; accumulates squared norms of its modules."""

    def __init__(
        self, activations: BlockActivations, batch: int, n: int, multiply: Product, metric: Metric | None = None
    ) -> None:
        self.a, self.block, self.batch, self.n, self.multiply = activations, activations.block, batch, n, multiply
        self.squares: Squares = {}
        self.metric, self.scaled = metric, []
        """Squared norms of the scaled gradients by module, if there is a metric."""

    def through_block(self, delta: Delta) -> Delta:
        """Carry the gradient from the block's output to its input."""
        return self._through_attention(self._through_mlp(delta))

    def through_attention_at(
        self, residual: Float[Tensor, "B K d"], attended: Float[Tensor, "B K w"], positions: Int[Tensor, "B K"]
    ) -> Delta:
        """Carry the gradient at one position per token through attention, which is all that remains in the last block.

        residual: gradient at the block's input through the residual connection; attended: gradient at attention's
        output before its projection. Everything after that belongs to the head.
        """
        block, a = self.block, self.a
        sequences, tokens = (torch.arange(count, device=positions.device) for count in positions.shape)
        at = sequences[:, None], positions
        probs, heads = a.probs.at(positions, self.n), attended.unflatten(2, (-1, block.head_dim))
        q, k, v = attention_backward_at(heads, positions, probs, *self._heads(), scaling=block.scaling)
        # As a prefix of one position, different for each token.
        q = self._unrotate(q[:, None], block.query_norm, a.query_norm, lambda t: t[at].transpose(1, 2))
        inputs = a.inputs(block.query)[at]
        self.squares[block.query.name] = outer_square_norms(q[:, 0], inputs, bias=block.query.module.bias is not None)
        if self.metric is not None:
            self.scaled.append(self.metric.at_one_position(block.query.module, q[:, 0], inputs))
        back = self._through_keys_and_values(k, v)
        back[*at, tokens] += linear_backward(q, block.query.module.weight, multiply=self.multiply)[:, 0]
        back = self._norm(back, block.attention_norm, self._prefix(a.attention_norm))
        back[*at, tokens] += residual
        return back

    def _through_mlp(self, delta: Delta) -> Delta:
        """Carry δ back through x + mlp(y), y = norm(x): down, activation(gate) ∘ up, then gate and up."""
        block, a = self.block, self.a
        hidden = self._linear(self._end(delta, block.mlp_end, a.mlp_end), block.down)
        back = self._linear(hidden * self._first(a.activated), block.up)
        back = self._linear(hidden.mul_(self._first(a.gate_slope)), block.gate, into=back)
        return self._norm(back, block.mlp_norm, self._prefix(a.mlp_norm), residual=delta)

    def _through_attention(self, delta: Delta) -> Delta:
        """Carry δ back through x + output(softmax(q kᵀ) v), y = norm(x), with q and k rotated."""
        block, a = self.block, self.a
        heads = self._linear(self._end(delta, block.attention_end, a.attention_end), block.output)
        heads = heads.unflatten(3, (-1, block.head_dim))
        probs = partial(a.probs.strip, self.batch)
        q, k, v = attention_backward(heads, probs, *self._heads(), scaling=block.scaling, multiply=self.multiply)
        q = self._unrotate(q, block.query_norm, a.query_norm, self._first)
        back = self._linear(q, block.query, into=self._through_keys_and_values(k, v))
        return self._norm(back, block.attention_norm, self._prefix(a.attention_norm), residual=delta)

    def _through_keys_and_values(self, k: Tensor, v: Tensor) -> Delta:
        block, a = self.block, self.a
        k = self._unrotate(k, block.key_norm, a.key_norm, self._first)
        return self._linear(v.flatten(3), block.value, into=self._linear(k, block.key))

    def _unrotate(
        self, delta: Tensor, norm: Norm | None, seen: tuple[Tensor, Tensor] | None, at: Callable[[Tensor], Tensor]
    ) -> Delta:
        """Carry δ back from the rotated heads to the projection's output; `at` selects positions of shared tensors."""
        delta = rotary_backward(delta, at(self.a.cos), at(self.a.sin))
        if norm is not None:
            delta = self._norm(delta, norm, (at(seen[0]), at(seen[1])))
        return delta.flatten(3)

    def _end(self, delta: Delta, norm: Norm | None, seen: tuple[Tensor, Tensor] | None) -> Delta:
        """Carry δ back through the norm after attention or MLP, if there is one."""
        return delta if norm is None else self._norm(delta, norm, self._prefix(seen))

    def _linear(self, delta: Delta, matrix: Matrix, *, into: Tensor | None = None) -> Float[Tensor, "B n K inputs"]:
        self.squares[matrix.name] = self._square_norms(delta, matrix)
        if self.metric is not None:
            self.scaled.append(self.metric.linear(matrix.module, delta, self._first(self.a.inputs(matrix))))
        return linear_backward(delta, matrix.module.weight, into=into, multiply=self.multiply)

    def _norm(
        self, delta: Tensor, norm: Norm, seen: tuple[Tensor, Tensor], *, residual: Tensor | None = None
    ) -> Tensor:
        back, scale = rms_norm_backward(delta, seen[0], norm.scale, seen[1], residual=residual)
        self.squares[norm.name] = scale.square().sum(2)
        if self.metric is not None:
            self.scaled.append(self.metric.vector(norm.weight, scale))
        return back

    def _square_norms(self, delta: Tensor, matrix: Matrix) -> Float[Tensor, "B K"]:
        factor, triangular = self.a.factor(matrix, self.n)
        return linear_square_norms(delta, factor[: self.batch], triangular=triangular, multiply=self.multiply)

    def _heads(self) -> list[Tensor]:
        a = self.a
        return [*map(self._first, (a.attended, a.queries, a.keys, a.values))]

    def _prefix(self, seen: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return self._first(seen[0]), self._first(seen[1])

    def _first(self, values: Tensor) -> Tensor:
        return values[: self.batch, : self.n]
