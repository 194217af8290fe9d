"""FLOPs of the parts of a training step."""

from __future__ import annotations

from gradscope.gradients.cost.model import ModelShape, Piece, backward_flops, forward_flops

Number = int | float


def pass_flops(shape: ModelShape, piece: Piece, *, tokens: Number | None = None) -> Number:
    """A pass without gradient through all blocks, scores of all pairs of positions among it, and the head where logits
    are kept.

    tokens: that go through the layers, where responses share their prompts; None: the piece's.
    """
    tokens = piece.tokens if tokens is None else tokens
    matrices = 2 * shape.active * tokens + 2 * shape.hidden * shape.vocab * piece.logits
    return matrices + _attention(shape, piece)


def _attention(shape: ModelShape, piece: Piece) -> Number:
    return 4 * shape.layers * shape.query_width * piece.tokens * piece.length


def prompt_flops(shape: ModelShape, prompts: int, length: int) -> Number:
    """Reading each prompt once, with the logits of its last token."""
    return pass_flops(shape, Piece(prompts, length, 1))


def decoding_flops(shape: ModelShape, whole: Piece) -> Number:
    """Decoding all responses token by token; whole: they with their prompts, kept the response tokens."""
    keys = whole.logits * (whole.length - whole.kept / 2)
    matrices = 2 * (shape.active + shape.hidden * shape.vocab) * whole.logits
    return matrices + 4 * shape.layers * shape.query_width * keys


def training_flops(
    shape: ModelShape, piece: Piece, *, lora_rank: int | None, checkpointing: bool, tokens: Number | None = None
) -> dict[str, Number]:
    """Forward and backward pass of one micro-batch; tokens as in `pass_flops`."""
    forward, attention = pass_flops(shape, piece, tokens=tokens), _attention(shape, piece)
    # Each product has two gradients; `backward_flops` knows which of them adapters save.
    times = backward_flops(shape, piece, lora_rank=lora_rank) / forward_flops(shape, piece)
    backward = times * (forward - attention) + 2.5 * attention  # sdpa computes its scores once more
    return {"training, forward": (2 if checkpointing else 1) * forward, "training, backward": backward}
