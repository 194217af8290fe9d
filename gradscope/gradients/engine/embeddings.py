"""The norm of an embedding table's gradient, which the output head may share."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor, nn

from gradscope.gradients.engine.head import HeadPass
from gradscope.gradients.engine.norms import embedding_square_norms, tied_cross_terms
from gradscope.gradients.engine.ownership import Ownership


def table_square_norms(
    ownership: Ownership,
    name: str,
    module: nn.Embedding,
    ids: Int[Tensor, "B n"],
    delta: Float[Tensor, "B n K d"],
    head: HeadPass,
    picks: Int[Tensor, "B K"],
) -> Float[Tensor, "B K"]:
    """Squared norm over the ids that were looked up, from what flows back to the embedding's output.

    For a table that is the head's too, with the cross term 2 ⟨head's gradient, embedding's gradient⟩ of the picked
    rows; the head's own square is not in it.
    """
    if (scale := ownership.embedding_scale[name]) != 1:  # else a copy of all that flows back is spared
        delta = delta * scale
    if module.padding_idx is not None:
        delta = delta * (ids != module.padding_idx)[:, :, None, None]
    square = embedding_square_norms(delta, ids)
    if ownership.tied and name == ownership.tied[0]:
        _, head_delta, head_input = head.local[ownership.tied[1]]
        square = square + tied_cross_terms(delta, ids, head_delta[picks].to(delta), head_input[picks].to(delta))
    return square
