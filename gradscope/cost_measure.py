"""FLOPs, bytes and operations of exact token gradients: the least that they take, and what the engine does beside it.

A token whose logits stand at position p has a gradient at the n = p + 1 positions of its prefix. The least is to carry
it back through every block over that prefix, and to turn what arrives at each linear layer into the norm of its
weight's gradient, ‖Σ_s δ_s a_sᵀ‖. The last block is nearly free: up to its attention's values δ lives at p alone.

Blocks are those of `gradscope.cost`, without biases. All counts are sums over the tokens or chunks of a batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gradscope.cost import ModelShape, Piece, forward_flops
from gradscope.machine_speed import Work, total

Number = int | float


@dataclass(frozen=True)
class Response:
    """What of a response decides what measuring it costs."""

    targets: int
    """Response tokens: each has its logits computed."""
    prefixes: tuple[int, ...]
    """Length of the prefix, in tokens, of each token that gets a backward pass; ascending."""
    length: int
    """Tokens before the last target."""


@dataclass(frozen=True)
class Engine:
    """What an engine does beside the least, for each block and chunk of K tokens over n positions."""

    streams: Number
    """Arrays [K n, hidden] that elementwise passes read and write."""
    gates: Number
    """Arrays [K n, width of the MLP]."""
    scores: Number
    """Arrays [K n, heads, n]."""
    operations: Number
    """Operations for each chunk."""
    token_operations: Number
    """And for each of its tokens."""
    knows_last_block: bool
    """Whether the last block is nearly free; else it is as dense as the others, but for what follows its attention."""
    forward_each_chunk: bool
    """Whether each chunk has a forward pass over its prefix; else each response has one."""


GENERAL = Engine(90, 8, 9, 233, 3, knows_last_block=False, forward_each_chunk=True)
"""Batched vector-Jacobian products through any block."""
RULES = GENERAL
"""Hand-written rules for the common decoder's block."""

FORWARD_STREAMS, FORWARD_GATES, FORWARD_SCORES, FORWARD_OPERATIONS = 45, 5, 5, 150
"""The same of a forward pass of transformers' Qwen2: arrays of hidden, MLP and scores, operations of a block."""
LOGIT_PASSES, HEAD_OPERATIONS = 30, 200
"""Arrays of logits that statistics, e − π and the head's gradients read and write, and operations for each response."""
QR_SLOWNESS = 4
"""A factorisation's FLOPs take about so much longer than a product's."""
STRIP = 64
"""Columns of a triangular factor that are multiplied at once; half of each strip's last square is zeros."""


def floor_flops(shape: ModelShape, prefixes: Sequence[int]) -> dict[str, Number]:
    """FLOPs that the exact norms of tokens with prefixes of these lengths need at least, by part.

    backward: of activation gradients, head included. norms: the contractions with a triangular factor [n, min(n, d)] of
    each linear layer's inputs. The forward pass and the factors, which the tokens of a response share, are left out.
    """
    parts = [(_backward(shape, n, scored=(n + 1) / 2, last_is_free=True), _contraction(shape, n)) for n in prefixes]
    return {"backward": sum(part[0].flops for part in parts), "norms": sum(part[1] for part in parts)}


def measure_work(
    shape: ModelShape, responses: Sequence[Response], *, engine: Engine, rows: int = 1536
) -> dict[str, Work]:
    """What measuring these responses takes, by part. rows: positions × tokens of one chunk."""
    work = {name: [] for name in ("forward", "head", "factors", "backward", "norms")}
    for response in responses:
        chunks = list(split_chunks(response.prefixes, rows))
        passes = [n for _, n in chunks] if engine.forward_each_chunk else []
        # One for the statistics, one for the head, the body's own.
        work["forward"] += [forward_work(shape, Piece(1, n, 0)) for n in (response.length, response.length, *passes)]
        work["head"].append(_head_work(shape, response))
        if chunks:
            work["factors"].append(_factor_work(shape, response.length))
        for tokens, n in chunks:
            work["backward"].append(_backward_work(shape, engine, tokens, n))
            work["norms"].append(_norm_work(shape, engine, tokens, n))
    return {name: total(parts) for name, parts in work.items()}


def split_chunks(prefixes: Sequence[int], rows: int) -> Iterator[tuple[int, int]]:
    """(tokens, positions) of each chunk: neighbouring tokens over the prefix of the last, as many as fill the rows.

    >>> list(split_chunks([10, 11, 12, 13, 40], 30))
    [(3, 12), (1, 13), (1, 40)]
    """
    start = 0
    while start < len(prefixes):
        first = prefixes[start]
        # Without a wide gap: the first token would carry a prefix much longer than its own.
        picks = [n for n in prefixes[start : start + max(1, rows // first)] if n <= max(first + 16, first * 5 // 4)]
        yield len(picks), picks[-1]
        start += len(picks)


def forward_work(shape: ModelShape, piece: Piece) -> Work:
    """A pass without gradient through all blocks, and the head where logits are kept."""
    return Work(
        products=forward_flops(shape, piece) - _pairs_flops(shape, piece, (piece.length + 1) / 2),
        attention=_pairs_flops(shape, piece, piece.length),
        moved=4 * shape.layers * piece.tokens * _widths(shape, FORWARD_STREAMS, FORWARD_GATES),
        operations=shape.layers * FORWARD_OPERATIONS,
    )


def _pairs_flops(shape: ModelShape, piece: Piece, mean_keys: Number) -> Number:
    """Of attention's two products, a position having this many keys in the mean."""
    return 4 * shape.layers * shape.query_width * piece.tokens * mean_keys


def _widths(shape: ModelShape, streams: Number, gates: Number) -> Number:
    return streams * shape.hidden + gates * shape.mlp_width


def _backward(shape: ModelShape, n: int, *, scored: Number, last_is_free: bool) -> Work:
    """One token's activation gradient over n positions. scored: keys that a position attends to, in the mean."""
    block, spread = 2 * shape.active / shape.layers, 2 * shape.hidden * shape.kv_width
    # Of the scores, the values, the queries and the keys.
    scores = 4 * 2 * shape.query_width
    dense = shape.layers - 1
    products = dense * block * n + 2 * shape.hidden * shape.vocab
    inputs = spread + shape.hidden * shape.query_width
    if last_is_free:
        # Keys and values spread; queries, attention's output and the MLP stand at one position.
        products += 2 * spread * n + block - 2 * spread
        return Work(products=products, attention=scores * (dense * n * scored + n))
    products += 2 * inputs * n + block - 2 * inputs
    return Work(products=products, attention=scores * (dense + 1) * n * scored)


def _linear_layers(shape: ModelShape) -> tuple[tuple[Number, Number], ...]:
    """(outputs, inputs) of a block's linear layers."""
    return (
        (shape.query_width + 2 * shape.kv_width + 2 * shape.mlp_width, shape.hidden),
        (shape.hidden, shape.query_width),
        (shape.hidden, shape.mlp_width),
    )


def _contraction(shape: ModelShape, n: int) -> Number:
    """FLOPs that turn one token's gradients at the outputs of linear layers into norms of their weights' gradients."""
    dense = sum(_contract(out, inside, n) for out, inside in _linear_layers(shape))
    last = _contract(2 * shape.kv_width, shape.hidden, n)
    # The tied table's cross term: the head's input with what flows back to each position.
    return (shape.layers - 1) * dense + last + (0 if shape.head else 2 * shape.hidden * n)


def _contract(out: Number, inside: Number, n: int, *, strip: Number = 1) -> Number:
    """FLOPs of δᵀ L for L [n, min(n, inside)], triangular unless n is twice as long as the input is wide."""
    if n >= 2 * inside:
        return 2 * out * n * inside
    columns = min(n, inside)
    return out * columns * (2 * n - columns + strip)


def _head_work(shape: ModelShape, response: Response) -> Work:
    """Logits of all targets twice, for the statistics and for the gradient, which goes back through the last MLP."""
    logits = 2 * shape.hidden * shape.vocab * response.targets
    local = 2 * (shape.active / shape.layers - 2 * shape.hidden * (shape.kv_width + shape.query_width / 2))
    return Work(
        products=3 * logits + local * response.length,
        logits=LOGIT_PASSES * 4 * shape.vocab * response.targets,
        operations=HEAD_OPERATIONS,
    )


def _factor_work(shape: ModelShape, length: int) -> Work:
    """QR factorisations of the inputs of every block's linear layers, where they are not taken as they are."""
    each = [2 * length**2 * inside for _, inside in _linear_layers(shape) if length < 2 * inside]
    return Work(products=QR_SLOWNESS * shape.layers * sum(each), operations=10 * shape.layers)


def _backward_work(shape: ModelShape, engine: Engine, tokens: int, n: int) -> Work:
    free = engine.knows_last_block
    head = 2 * shape.hidden * shape.vocab  # done for all tokens at once
    each = _backward(shape, n, scored=n, last_is_free=free) + Work(products=-head)
    dense = shape.layers - free
    arrays = _widths(shape, engine.streams, engine.gates) + engine.scores * shape.heads * n
    return each * tokens + Work(
        moved=4 * dense * tokens * n * arrays,
        operations=shape.layers * (engine.operations + engine.token_operations * tokens),
    )


def _norm_work(shape: ModelShape, engine: Engine, tokens: int, n: int) -> Work:
    blocks = [_contract(out, inside, n, strip=STRIP) for out, inside in _linear_layers(shape)]
    last = (2 * shape.kv_width + (0 if engine.knows_last_block else shape.query_width), shape.hidden)
    flops = (shape.layers - 1) * sum(blocks) + _contract(*last, n, strip=STRIP)
    return Work(products=tokens * (flops + (0 if shape.head else 2 * shape.hidden * n)))
