"""The norm of an embedding table's gradient, which the output head may share."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor, nn

from gradscope.gradients.engine.head import HeadPass
from gradscope.gradients.engine.metric import Metric
from gradscope.gradients.engine.norms import embedding_square_norms, tied_cross_terms
from gradscope.gradients.engine.ownership import Ownership


@dataclass(frozen=True)
class TableNorms:
    """Norms of an embedding table's gradient; the head may share the table."""

    ownership: Ownership
    name: str
    module: nn.Embedding
    head: HeadPass

    def squares(
        self,
        ids: Int[Tensor, "B n"],
        delta: Float[Tensor, "B n K d"],
        picks: Int[Tensor, "B K"],
        metric: Metric | None = None,
    ) -> Float[Tensor, "B K"]:
        """Return the squared norm over the looked-up ids, from what flows back to the embedding's output.

        For a table that is the head's too, with the cross term 2 ⟨head's gradient, embedding's gradient⟩ of the picked
        rows; the head's own square is not in it. metric: of the scaled gradient.
        """
        if (factor := self.ownership.embedding_scale[self.name]) != 1:  # else a copy of all that flows back is spared
            delta = delta * factor
        if self.module.padding_idx is not None:
            delta = delta * (ids != self.module.padding_idx)[:, :, None, None]
        scale = None if metric is None else metric.of(self.module.weight)
        square = embedding_square_norms(delta, ids, scale)
        if self.ownership.tied and self.name == self.ownership.tied[0]:
            _, head_delta, head_input = self.head.local[self.ownership.tied[1]]
            rows = head_delta[picks].to(delta), head_input[picks].to(delta)
            square = square + tied_cross_terms(delta, ids, *rows, scale)
        return square
