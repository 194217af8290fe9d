"""FLOPs and bytes of exact token gradients: the least that they take, and what the engine does.

A token whose logits stand at position p has a gradient at the n = p + 1 positions of its prefix. The least is to carry
it back through every block over that prefix, and to turn what arrives at each linear layer into the norm of its
weight's gradient, ‖Σ_s δ_s a_sᵀ‖. The last block is nearly free: up to its attention's values, δ lives at p alone.

Blocks are those of `ModelShape`, without biases. All counts are sums over the tokens or chunks of a
batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool

from gradscope.gradients.checked_tokens import CHECKED_EACH, LIGHT
from gradscope.gradients.cost.shape import ModelShape, block_activation_bytes
from gradscope.gradients.engine.chunks import ROWS, Limits, Span, group_sequences, neighbours
from gradscope.gradients.engine.decoder.body import (
    chunk_limits,
    kept_bytes,
    most_sequences,
    probs_bytes,
    row_bytes,
    seen_bytes,
)
from gradscope.gradients.engine.decoder.rules import NARROWEST_QUERIES
from gradscope.gradients.engine.head import LOGIT_BYTES, logit_rows
from gradscope.gradients.engine.meter import TRIAL
from gradscope.gradients.engine.norms import WIDEST, strip_width
from gradscope.intervals import EDGES
from gradscope.rollouts import TokenBatch

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

    @property
    def reach(self) -> int:
        """Tokens before the last one that gets a backward pass: the engine computes nothing behind it."""
        return max(self.prefixes, default=0)


def describe_responses(batch: TokenBatch, chosen: Bool[np.ndarray, " n"]) -> list[Response]:
    """Of a batch's responses, without those that keep no token; chosen: which kept tokens get a backward pass."""
    out, counts = [], batch.response_mask.sum(1).tolist()
    for row, picked in enumerate(np.split(chosen, np.cumsum(counts)[:-1])):
        targets = batch.sequence(row)[1].numpy()
        if len(targets):
            out.append(Response(len(targets), tuple(targets[picked].tolist()), int(targets[-1])))
    return out


TRIALS = {True: 20, False: 8}
"""Forward passes over a trial sequence that take as long as trying the model's structure on it, for a common decoder
and for other models: fitted to times."""
WHOLE_PASSES, CHECK_PASSES = 1.5, 6
"""Forward passes over the longest response that finding the structure makes; those that take as long as the self-check
of a token: measured."""
LIGHT_PASSES, LIGHT_START = 3, 2
"""The same of a token of a light self-check, over the shortest prefix, and of what its tokens share."""
CHECKED = CHECKED_EACH * (len(EDGES) - 1)
"""Tokens of the self-check at most."""
GRAPH_SCORES = 3
"""Arrays [heads, n, n] that a block of eager attention keeps for its backward pass."""


def floor_flops(shape: ModelShape, prefixes: Sequence[int]) -> dict[str, Number]:
    """FLOPs that the exact norms of tokens with prefixes of these lengths need at least, by part.

    backward: of activation gradients, head included. norms: the contractions with a triangular factor [n, min(n, d)] of
    each linear layer's inputs. The forward pass and the factors, which the tokens of a response share, are left out.
    """
    backward = (_backward(shape, n, keys=(n + 1) / 2, last_is_free=True) for n in prefixes)
    head = 2 * shape.hidden * shape.vocab * len(prefixes)
    return {"backward": head + sum(backward), "norms": sum(_norms(shape, n, last_is_free=True) for n in prefixes)}


def measure_flops(
    shape: ModelShape,
    responses: Sequence[Response],
    *,
    rules: bool,
    rows: int | None = None,
    memory: int = 1 << 30,
    device: str = "cpu",
    self_check: bool = True,
) -> dict[str, Number]:
    """FLOPs of measuring these responses, by part.

    rules: whether the engine goes by backward rules: then one forward pass serves a few responses, the last block is
    nearly free, and each strip of queries has the keys up to its end. Else every chunk has a forward pass, and all is
    dense but for what follows the last block's attention. rows, memory: chunk_rows and chunk_memory of `measure`.
    """
    cut = {"rules": rules, "rows": rows, "memory": memory, "device": device}
    length = max(response.length for response in responses)
    trial = min(TRIAL, length)
    flops = dict.fromkeys(("preparation", "forward", "head", "factors", "backward", "norms"), 0.0)
    flops["preparation"] += WHOLE_PASSES * _forward(shape, length) + TRIALS[rules] * _forward(shape, trial, trial)
    if self_check:
        flops["preparation"] += _check_flops(shape, responses, length)
    for group in group_responses(shape, responses, **cut):
        spans, length = list(split_chunks(shape, group, **cut)), max(response.reach for response in group)
        # For the statistics, which find the intervals.
        flops["forward"] += sum(_forward(shape, response.length, response.targets) for response in group)
        flops["head"] += _head(shape, group)
        if spans:
            # For the head, which the rules share; along the graph each chunk.
            flops["head"] += len(group) * _forward(shape, length)
            flops["factors"] += _factors(shape, len(group), length)
        if not rules:
            flops["backward"] += sum(_forward(shape, span.length) for span in spans)
        elif spans:
            # Attention's probabilities, as the rules need them; of every chunk anew where they do not fit the memory.
            scores = 2 * shape.layers * shape.query_width
            flops["factors"] += 2 * scores * len(group) * length**2
            if not _keeps_probs(shape, group, memory):
                flops["backward"] += sum(scores * len(span.tokens) * span.length**2 for span in spans)
        flops["backward"] += sum(span.places * _chunk(shape, span.length, rules=rules) for span in spans)
        flops["norms"] += sum(span.places * _norms(shape, span.length, last_is_free=rules, cut=True) for span in spans)
    return flops


def _forward(shape: ModelShape, length: int, logits: int = 0) -> Number:
    """A pass over one sequence, scores of all pairs of positions among it."""
    matrices = 2 * shape.active * length + 2 * shape.hidden * shape.vocab * logits
    return matrices + 4 * shape.layers * shape.query_width * length**2


def _check_flops(shape: ModelShape, responses: Sequence[Response], longest: int) -> Number:
    """The self-check's; a light one is of few tokens with short prefixes."""
    prefixes = [prefix for response in responses for prefix in response.prefixes]
    count = min(CHECKED, len(prefixes))
    if 6 * shape.parameters * count * sum(prefixes) <= LIGHT * max(1, len(prefixes)):
        return CHECK_PASSES * count * _forward(shape, longest)
    passes = LIGHT_START + LIGHT_PASSES * min(CHECKED // CHECKED_EACH, len(prefixes))
    return passes * _forward(shape, min(prefixes))


def group_responses(
    shape: ModelShape, responses: Sequence[Response], *, rules: bool, rows: int | None, memory: int, device: str
) -> list[list[Response]]:
    """Those that the engine measures together, in the order that it takes them in."""
    limits = find_limits(shape, rules=rules, rows=rows, memory=memory, device=device)

    def most(length: int) -> int:
        kept = _seen_bytes(shape, rules, length) + probs_bytes(shape.layers * shape.scores * shape.heads, length)
        return most_sequences(length, kept, rows=limits.rows, logits=logit_rows(shape.vocab, memory), memory=memory)

    lengths, reaches = [response.prefixes for response in responses], [response.reach for response in responses]
    groups = group_sequences(lengths, reaches, limits, most=most)
    return [[responses[index] for index in group] for group in groups]


def split_chunks(
    shape: ModelShape, group: Sequence[Response], *, rules: bool, rows: int | None, memory: int, device: str
) -> Iterator[Span]:
    """The chunks of responses that are measured together, as the engine cuts them."""
    limits = find_limits(shape, rules=rules, rows=rows, memory=memory, device=device)
    return neighbours([response.prefixes for response in group], limits)


def find_limits(shape: ModelShape, *, rules: bool, rows: int | None, memory: int, device: str) -> Limits:
    """Chunk limits, as the engine has them."""
    row = int(_row_bytes(shape, rules))
    if not rules:
        return Limits(min(ROWS if rows is None else rows, max(1, memory // (2 * row))), start=None)
    fit = max(1, memory // row)
    return chunk_limits(shape.active / shape.layers, *_widths(shape), device=device, rows=rows, fit=fit)


def _linear_layers(shape: ModelShape) -> tuple[tuple[Number, Number], ...]:
    """(outputs, inputs) of a block's linear layers, those of one input together."""
    return (
        (shape.query_width + 2 * shape.kv_width + 2 * shape.mlp_width, shape.hidden),
        (shape.hidden, shape.query_width),
        (shape.hidden, shape.mlp_width),
    )


def _outputs(shape: ModelShape) -> Number:
    """Numbers that come out of all linear layers of all blocks, for a token."""
    return shape.layers * sum(out for out, _ in _linear_layers(shape))


def _backward(shape: ModelShape, n: Number, *, keys: Number, last_is_free: bool) -> Number:
    """One token's activation gradient over n positions, below the head. keys: of a position, in the mean."""
    block, dense = 2 * shape.active / shape.layers, shape.layers - 1
    spread = 4 * shape.hidden * shape.kv_width  # through keys and values
    queries = 2 * shape.hidden * shape.query_width
    # Of the scores, the values, the queries and the keys.
    attention = 8 * shape.query_width
    if last_is_free:
        # Keys and values spread; queries, attention's output and the MLP stand at one position.
        return dense * block * n + spread * n + block - spread + attention * (dense * n * keys + n)
    products = dense * block * n + (spread + queries) * n + block - spread - queries
    return products + attention * (dense + 1) * n * keys


def _norms(shape: ModelShape, n: Number, *, last_is_free: bool, cut: bool = False) -> Number:
    """FLOPs that turn one token's gradients at the outputs of linear layers into norms of their weights' gradients."""
    dense = sum(_contract(out, inside, n, cut=cut) for out, inside in _linear_layers(shape))
    last = 2 * shape.kv_width + (0 if last_is_free else shape.query_width)
    # The tied table's cross term: the head's input with what flows back to each position.
    tied = 0 if shape.head else 2 * shape.hidden * n
    return (shape.layers - 1) * dense + _contract(last, shape.hidden, n, cut=cut) + tied


def _contract(out: Number, inside: Number, n: Number, *, cut: bool) -> Number:
    """FLOPs of δᵀ L, L [n, min(n, inside)] lower triangular; cut: in strips of columns, as the engine does."""
    columns = min(n, inside)
    return out * columns * (2 * n - columns + (strip_width(columns) if cut else 1))


def _head(shape: ModelShape, group: Sequence[Response]) -> Number:
    """Logits of the tokens that are measured once more, with their gradient, which goes back through the last MLP."""
    length, measured = max(r.reach for r in group), sum(len(r.prefixes) for r in group)
    local = 2 * (shape.active / shape.layers - shape.hidden * (2 * shape.kv_width + shape.query_width))
    return 4 * shape.hidden * shape.vocab * measured + local * len(group) * length


def _factors(shape: ModelShape, batch: int, length: int) -> Number:
    """QR factorisations of the inputs of every block's linear layers."""
    each = [2 * batch * length * inside * min(length, inside) for _, inside in _linear_layers(shape)]
    return shape.layers * sum(each)


def _chunk(shape: ModelShape, n: int, *, rules: bool) -> Number:
    """One token's way back through all blocks in a chunk of n positions."""
    keys = (n + strip_width(n, NARROWEST_QUERIES)) / 2 if rules else n
    return _backward(shape, n, keys=keys, last_is_free=rules)


def _keeps_probs(shape: ModelShape, group: Sequence[Response], memory: int) -> bool:
    """Whether attention's probabilities stay from one chunk to the next, as `DecoderBody.keeps_probs` has it."""
    longest = max(response.reach for response in group)
    return len(group) * probs_bytes(shape.layers * shape.scores * shape.heads, longest) <= memory


def measure_bytes(
    shape: ModelShape,
    responses: Sequence[Response],
    *,
    rules: bool,
    rows: int | None = None,
    memory: int = 1 << 30,
    device: str = "cpu",
    weight_bytes: Number = 4,
) -> dict[str, dict[str, Number]]:
    """What lies in memory at most, by moment and part; weight_bytes: of one parameter."""
    weights = {"weights": weight_bytes * shape.parameters}
    longest = max(response.reach for response in responses)
    cut = {"rules": rules, "rows": rows, "memory": memory, "device": device}
    groups = group_responses(shape, responses, **cut)
    most = min(max(map(_logit_positions, groups)), logit_rows(shape.vocab, memory))
    kept = max(
        len(group)
        * _kept_bytes(shape, rules, max(r.reach for r in group), keeps_probs=_keeps_probs(shape, group, memory))
        for group in groups
    )
    spans = (span for group in groups for span in split_chunks(shape, group, **cut))
    carried = (span.rows * _row_bytes(shape, rules, strip_width(span.length, NARROWEST_QUERIES)) for span in spans)
    chunk = {"response": kept, "chunk": max(carried, default=0)}
    if not rules:
        scores = GRAPH_SCORES * shape.heads * longest**2
        chunk["graph"] = shape.layers * (block_activation_bytes(shape, "float32") * longest + 4 * scores)
    seen = max(len(group) * _seen_bytes(shape, rules, max(r.reach for r in group)) for group in groups)
    return {"head": weights | {"logits": LOGIT_BYTES * shape.vocab * most, "response": seen}, "chunk": weights | chunk}


def _logit_positions(group: Sequence[Response]) -> int:
    """Positions, over all responses, that predict a measured token of one of them."""
    return len(group) * len({prefix for response in group for prefix in response.prefixes})


def _seen_bytes(shape: ModelShape, rules: bool, length: int) -> Number:
    """What a forward pass leaves of one response: inputs of linear layers and, for the rules, their outputs."""
    if not rules:
        return 4 * shape.layers * length * (3 * shape.hidden + shape.query_width + shape.mlp_width)
    return shape.layers * seen_bytes(*_widths(shape), length, norms=shape.norms)


def _kept_bytes(shape: ModelShape, rules: bool, length: int, *, keeps_probs: bool) -> Number:
    """What of it is kept while its tokens are measured, and what is made of it."""
    if not rules:
        factors = sum(min(length, inside) for inside in (shape.hidden, *(d for _, d in _linear_layers(shape))))
        return _seen_bytes(shape, rules, length) + 4 * shape.layers * length * factors
    # One block's are made and, while they are, its scores.
    probs = probs_bytes((shape.layers if keeps_probs else 2) * shape.scores * shape.heads, length)
    return shape.layers * kept_bytes(*_widths(shape), length, norms=shape.norms) + probs


def _widths(shape: ModelShape) -> tuple[Number, Number, Number, Number]:
    """Widths of the residual stream, of all queries, of all keys and of the MLP."""
    return shape.hidden, shape.query_width, shape.kv_width, shape.mlp_width


def _row_bytes(shape: ModelShape, rules: bool, strip: int = WIDEST) -> Number:
    """Bytes of one token at one position of a chunk."""
    if rules:
        return row_bytes(shape.hidden, shape.mlp_width, shape.heads, strip=strip)
    return 4 * (_outputs(shape) + (3 * shape.layers + 1) * shape.hidden)
