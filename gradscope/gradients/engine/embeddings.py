"""Norms of the gradient of an embedding table, possibly tied to the output head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxtyping import Float, Int
from torch import Tensor, nn

from gradscope.gradients.engine.metric import Metric
from gradscope.gradients.engine.norms import embedding_square_norms, tied_cross_terms
from gradscope.gradients.engine.ownership import Ownership

if TYPE_CHECKING:
    from gradscope.gradients.engine.head import HeadPass


@dataclass(frozen=True)
class TableNorms:
    """Norms of an embedding table's gradient, including the cross term with a tied head."""

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
        """Return the squared norm over the looked-up ids, given the gradient at the embedding's output.

        For a tied table it includes the cross term 2 ⟨head's gradient, embedding's gradient⟩ of the looked-up rows, but
        not the head's own square. metric: for the norm of the scaled gradient.
        """
        if (factor := self.ownership.embedding_scale[self.name]) != 1:  # otherwise spare the copy
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
