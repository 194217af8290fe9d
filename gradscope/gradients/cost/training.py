"""What a training step takes beside its FLOPs: passes over arrays, operations, decoding with few rows.

Counts of arrays are those of gradscope's trainer on transformers' Qwen2 in float32, taken once by a dispatch mode that
adds up what each elementwise operation reads and writes; no script here takes them again, for
analyses/benchmarks/work_counts.py counts measuring alone. Laying out prompts that responses share is among them. Passes
over logits and operations are fitted to times on a CPU: the trainer walks over logits in pieces that stay in a cache,
and Python does more around an operation of a transformers model than the bare one takes.
"""

from __future__ import annotations

import math

from gradscope.gradients.cost.model import (
    ModelShape,
    Piece,
    backward_flops,
    forward_flops,
    kv_bytes,
    trained_parameters,
)
from gradscope.gradients.cost.speed import Work

Number = int | float

FORWARD_STREAMS, FORWARD_GATES, FORWARD_OPERATIONS = 45, 5, 150
"""What a block's forward pass touches: arrays as wide as the stream and as the MLP that its elementwise operations read
and write for each token, and operations."""
BOTH_STREAMS, BOTH_GATES, BOTH_OPERATIONS = 140, 15, 400
"""Arrays of hidden and of the MLP's width, and operations, of a block's forward and backward pass together."""
FORWARD_LAYOUT, BOTH_LAYOUT = 45, 80
"""Arrays of hidden, beside these, where responses share their prompts and attention lays them out."""
SAMPLED_PASSES, SCORED_PASSES, TRAINED_PASSES = 8, 6, 8
"""Arrays of logits (4 bytes each) that drawing a token, its statistics, and its loss with gradient read and write, in
time of arrays larger than a cache."""
OPTIMIZER_BYTES, OPTIMIZER_OPERATIONS = 60, 120
"""That clipping and a step of AdamW read and write for each trained parameter, and operations for each block."""


def forward_work(shape: ModelShape, piece: Piece, *, tokens: Number | None = None) -> Work:
    """A pass without gradient through all blocks, and the head where logits are kept.

    tokens: that go through the layers, where responses share their prompts; None: the piece's.
    """
    streams = FORWARD_STREAMS + (0 if tokens is None else FORWARD_LAYOUT)
    tokens = piece.tokens if tokens is None else tokens
    return Work(
        products=2 * shape.active * tokens + 2 * shape.hidden * shape.vocab * piece.logits,
        attention=4 * shape.layers * shape.query_width * piece.tokens * piece.length,
        moved=4 * shape.layers * tokens * (streams * shape.hidden + FORWARD_GATES * shape.mlp_width),
        operations=shape.layers * FORWARD_OPERATIONS,
    )


def sampling_work(shape: ModelShape, whole: Piece, *, prompts: int, longest: int, at_once: int) -> Work:
    """Decoding all responses, at most `at_once` together, until the longest of each batch ends; finished ones drop out.

    whole: all responses with their prompts at their mean length, kept their response tokens. prompts: different ones,
    each read once. longest: tokens of the longest response.
    """
    prompt = whole.length - whole.kept
    steps = longest * math.ceil(whole.responses / at_once)
    keys = whole.logits * (prompt + whole.kept / 2)
    # Where responses end one by one, those that go on have their keys and values copied: read and written.
    endings = min(at_once, longest) if whole.kept < longest else 0
    copied = 2 * endings * math.ceil(whole.responses / at_once) * (at_once / 2) * (prompt + whole.kept / 2)
    decoding = Work(
        thin=2 * (shape.active + shape.hidden * shape.vocab) * whole.logits,
        attention=4 * shape.layers * shape.query_width * keys,
        moved=kv_bytes(shape, "float32") * (keys + copied),
        logits=SAMPLED_PASSES * 4 * shape.vocab * whole.logits,
        operations=steps * shape.layers * FORWARD_OPERATIONS,
    )
    return decoding + forward_work(shape, Piece(prompts, prompt, 1))


def scoring_work(shape: ModelShape, piece: Piece, *, tokens: Number | None = None) -> Work:
    """log π of the kept tokens of one micro-batch, without gradient; tokens as in `forward_work`."""
    return forward_work(shape, piece, tokens=tokens) + Work(logits=SCORED_PASSES * 4 * shape.vocab * piece.logits)


def training_work(
    shape: ModelShape, piece: Piece, *, lora_rank: int | None, checkpointing: bool, tokens: Number | None = None
) -> dict[str, Work]:
    """Forward and backward pass of one micro-batch, and its loss, which counts as backward; tokens as above."""
    forward = forward_work(shape, piece, tokens=tokens)
    streams = BOTH_STREAMS - FORWARD_STREAMS + (0 if tokens is None else BOTH_LAYOUT - FORWARD_LAYOUT)
    widths = streams * shape.hidden + (BOTH_GATES - FORWARD_GATES) * shape.mlp_width
    backward = Work(
        # Each product has two gradients; `backward_flops` knows which of them adapters save.
        products=backward_flops(shape, piece, lora_rank=lora_rank) / forward_flops(shape, piece) * forward.products,
        attention=2.5 * forward.attention,  # sdpa computes its scores once more
        moved=4 * shape.layers * (piece.tokens if tokens is None else tokens) * widths,
        logits=TRAINED_PASSES * 4 * shape.vocab * piece.logits,
        operations=shape.layers * (BOTH_OPERATIONS - FORWARD_OPERATIONS),
    )
    return {"training, forward": forward * (2 if checkpointing else 1), "training, backward": backward}


def optimizer_work(shape: ModelShape, *, lora_rank: int | None) -> Work:
    """Clipping and one step of AdamW."""
    return Work(
        moved=OPTIMIZER_BYTES * trained_parameters(shape, lora_rank), operations=OPTIMIZER_OPERATIONS * shape.layers
    )
