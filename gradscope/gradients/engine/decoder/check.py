"""Check that the rules' assumptions reproduce the model's activations on a sequence.

Rules that hold on a short sequence may fail on others: a model may scale its queries beyond some position, clip large
values, or attend within a window that no mask shows.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gradscope.gradients.attention import Band
from gradscope.gradients.engine.decoder.activations import BlockActivations, Seen
from gradscope.gradients.engine.decoder.parts import DecoderBlock

TOLERANCE, HALF_TOLERANCE = 1e-4, 0.1
"""Largest difference at a position, relative to its norm and to the mean norm: in float32, to which transformers casts
float64 inside modules, and in half precisions, where attention's scores are rounded before the exponential."""


def is_complete(block: DecoderBlock, seen: Seen) -> bool:
    """Return whether the forward pass recorded everything that the rules need, in the expected shapes."""
    parts = {part.name for part in (*block.matrices, *block.norms)}
    if seen.hidden is None or seen.inputs.keys() != parts:
        return False
    (batch, n), mask = seen.hidden.shape[:2], seen.mask
    heads = [seen.inputs[norm.name].shape[3:] for norm in block.head_norms]
    rows = all(x.shape[:2] == (batch, n) for x in seen.inputs.values())
    if not rows or any(shape != (block.head_dim,) for shape in heads):
        return False
    angles = len(seen.rotary) == 2 and all(
        angle.ndim == 3 and len(angle) in (1, batch) and angle.shape[1:] == (n, block.head_dim) for angle in seen.rotary
    )
    masked = mask is None or isinstance(mask, Band) or (
        isinstance(mask, Tensor) and mask.ndim == 4 and len(mask) in (1, batch) and mask.shape[-2:] == (n, n)
    )
    return angles and masked


@torch.no_grad()
def account_for(activations: BlockActivations, following: Float[Tensor, "B n d"] | None) -> Bool[Tensor, ""]:
    """Return whether a block's activations follow from each other by the rules; following: the next block's input."""
    wide = activations.model_dtype in (torch.float32, torch.float64)
    tolerance, close = TOLERANCE if wide else HALF_TOLERANCE, []
    for ours, theirs in _pairs(activations, following):
        if ours.shape != theirs.shape:
            return torch.tensor(False, device=theirs.device)
        if ours.data_ptr() != theirs.data_ptr():
            close.append(_are_close(ours, theirs, tolerance))
    return torch.stack(close).all()


def _pairs(a: BlockActivations, following: Tensor | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pairs (as the rules assume, as the model computed); following: the next block's input."""
    block = a.block
    seen = [(block.attention_norm, a.attention_norm), (block.mlp_norm, a.mlp_norm)]
    some = (block.query_norm, a.query_norm), (block.key_norm, a.key_norm)
    some += (block.attention_end, a.attention_end), (block.mlp_end, a.mlp_end)
    seen += [(norm, at) for norm, at in some if norm]
    for norm, (normalized, _) in seen:
        yield normalized[:, :, 0] * norm.scale, a.outputs(norm)
    for matrix in (block.query, block.key, block.value):
        yield a.outputs(block.attention_norm), a.inputs(matrix)
    for matrix in (block.gate, block.up):
        yield a.outputs(block.mlp_norm), a.inputs(matrix)
    yield a.probs.attend(a.values), a.attended
    for matrix, end in ((block.output, block.attention_end), (block.down, block.mlp_end)):
        if end is not None:
            yield a.outputs(matrix), a.inputs(end)
    yield a.hidden + a.outputs(block.attention_end or block.output), a.inputs(block.mlp_norm)
    yield a.activated[:, :, 0] * a.outputs(block.up), a.inputs(block.down)
    if following is not None:
        yield a.inputs(block.mlp_norm) + a.outputs(block.mlp_end or block.down), following


def _are_close(ours: Tensor, theirs: Tensor, tolerance: float) -> Bool[Tensor, ""]:
    """Return whether both agree at every position of [B, n, …]; False for NaN."""
    size = torch.linalg.vector_norm(theirs.flatten(2), dim=2)
    difference = torch.linalg.vector_norm((ours - theirs).flatten(2), dim=2)
    return (difference <= tolerance * (size + size.mean(1, keepdim=True))).all()
