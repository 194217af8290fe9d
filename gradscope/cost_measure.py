"""FLOPs, bytes and operations of exact token gradients: the least that they take, and what the engine does beside it.

A token whose logits stand at position p has a gradient at the n = p + 1 positions of its prefix. The least is to carry
it back through every block over that prefix, and to turn what arrives at each linear layer into the norm of its
weight's gradient, ‖Σ_s δ_s a_sᵀ‖. The last block is nearly free: up to its attention's values, δ lives at p alone.

Blocks are those of `gradscope.cost`, without biases. All counts are sums over the tokens or chunks of a batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gradscope.capture.chunks import neighbours
from gradscope.capture.decoder_body import probs_bytes, row_bytes, spare_rows
from gradscope.capture.decoder_rules import NARROWEST_QUERIES
from gradscope.capture.head import LOGIT_BYTES
from gradscope.capture.rules import WIDEST, strip_width
from gradscope.cost import ModelShape, Piece, block_activation_bytes
from gradscope.cost_train import forward_work
from gradscope.intervals import EDGES
from gradscope.machine_speed import Work, total
from gradscope.measure_settings import CHECKED_EACH

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
    """What an engine does for each block and chunk of K tokens over n positions, beside its products.

    Counted by analyses/benchmarks/work_counts.py, and held to it by a test.
    """

    streams: Number
    """Arrays [K n, hidden] that elementwise passes read and write."""
    gates: Number
    """Arrays [K n, width of the MLP]."""
    scores: Number
    """Arrays [K n, heads, keys]."""
    operations: Number
    """Operations for each chunk."""
    token_operations: Number
    """And for each of its tokens."""
    by_rules: bool
    """Whether it goes by backward rules: then one forward pass serves a response, the last block is nearly free, and
    each strip of queries has the keys up to its end. Else every chunk has a forward pass, and all is dense but for
    what follows the last block's attention."""


RULES = Engine(68, 8.5, 5.1, 107, 0.3, by_rules=True)
"""Backward rules, of a common decoder's block."""
GRAPH = Engine(97, 11, 8.8, 232, 2.9, by_rules=False)
"""The model's own graph, whatever its blocks are."""

LOGIT_PASSES, HEAD_OPERATIONS = 30, 200
"""Arrays of logits that statistics, e − π and the head's gradients read and write, and operations for each response."""
PREPARATION_PASSES, CHECK_PASSES = 6, 6
"""Forward passes that take as long as finding the structure on the longest response, and as the self-check of a token:
measured."""
CHECKED = CHECKED_EACH * (len(EDGES) - 1)
"""Tokens of the self-check at most."""
PROBS_PASSES, PROBS_OPERATIONS = 6, 6
"""Arrays of a block's scores that making attention's probabilities of them reads and writes, and operations."""
GRAPH_SCORES = 3
"""Arrays [heads, n, n] that a block of eager attention keeps for its backward pass."""
QR_SLOWNESS = 4
"""A factorisation's FLOPs take about so much longer than a product's."""


def floor_flops(shape: ModelShape, prefixes: Sequence[int]) -> dict[str, Number]:
    """FLOPs that the exact norms of tokens with prefixes of these lengths need at least, by part.

    backward: of activation gradients, head included. norms: the contractions with a triangular factor [n, min(n, d)] of
    each linear layer's inputs. The forward pass and the factors, which the tokens of a response share, are left out.
    """
    backward = (_backward(shape, n, keys=(n + 1) / 2, last_is_free=True).flops for n in prefixes)
    head = 2 * shape.hidden * shape.vocab * len(prefixes)
    return {"backward": head + sum(backward), "norms": sum(_norms(shape, n, last_is_free=True) for n in prefixes)}


def measure_work(
    shape: ModelShape,
    responses: Sequence[Response],
    *,
    engine: Engine,
    rows: int = 1536,
    memory: int = 1 << 30,
    device: str = "cpu",
    self_check: bool = True,
) -> dict[str, Work]:
    """What measuring these responses takes, by part. rows, memory: chunk_rows and chunk_memory of `measure`."""
    work = {name: [] for name in ("preparation", "forward", "head", "factors", "backward", "norms")}
    longest = forward_work(shape, Piece(1, max(response.length for response in responses), 0))
    checked = min(CHECKED, sum(len(response.prefixes) for response in responses)) if self_check else 0
    work["preparation"].append(longest * (PREPARATION_PASSES + CHECK_PASSES * checked))
    for response in responses:
        cut = {"engine": engine, "rows": rows, "memory": memory, "device": device}
        chunks = list(split_chunks(shape, response.prefixes, **cut))
        # For the statistics, which find the intervals; for the head, which the rules share; along the graph each chunk.
        lengths = [response.length, response.length, *([] if engine.by_rules else [n for _, n in chunks])]
        work["forward"] += [forward_work(shape, Piece(1, n, 0)) for n in lengths]
        work["head"].append(_head_work(shape, response))
        work["factors"].append(_factor_work(shape, response.length if chunks else 0))
        work["backward"] += [_chunk_work(shape, engine, tokens, n) for tokens, n in chunks]
        if engine.by_rules and chunks:
            # Once for the whole response, to try what its blocks did; if these are not kept, for each chunk again.
            made = [response.length] + ([] if _keeps_probs(shape, response, memory) else [n for _, n in chunks])
            work["backward"] += [_probs_work(shape, n) for n in made]
        norms = [k * _norms(shape, n, last_is_free=engine.by_rules, cut=True) for k, n in chunks]
        work["norms"].append(Work(products=sum(norms)))
    return {name: total(parts) for name, parts in work.items()}


def split_chunks(
    shape: ModelShape, prefixes: Sequence[int], *, engine: Engine, rows: int, memory: int, device: str
) -> Iterator[tuple[int, int]]:
    """(tokens, positions) of each chunk, as the engine cuts them."""
    spare, row = None, int(_row_bytes(shape, engine))
    if engine.by_rules:
        spare = spare_rows(shape.active / shape.layers, device)
    rows = min(rows, max(1, memory // (row if engine.by_rules else 2 * row)))
    for part in neighbours(list(prefixes), rows=rows, spare=spare):
        yield part.stop - part.start, prefixes[part.stop - 1]


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


def _backward(shape: ModelShape, n: Number, *, keys: Number, last_is_free: bool) -> Work:
    """One token's activation gradient over n positions, below the head. keys: of a position, in the mean."""
    block, dense = 2 * shape.active / shape.layers, shape.layers - 1
    spread = 4 * shape.hidden * shape.kv_width  # through keys and values
    queries = 2 * shape.hidden * shape.query_width
    # Of the scores, the values, the queries and the keys.
    attention = 8 * shape.query_width
    if last_is_free:
        # Keys and values spread; queries, attention's output and the MLP stand at one position.
        return Work(
            products=dense * block * n + spread * n + block - spread, attention=attention * (dense * n * keys + n)
        )
    products = dense * block * n + (spread + queries) * n + block - spread - queries
    return Work(products=products, attention=attention * (dense + 1) * n * keys)


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


def _head_work(shape: ModelShape, response: Response) -> Work:
    """Logits of all targets twice, for the statistics and for the gradient, which goes back through the last MLP."""
    logits = 2 * shape.hidden * shape.vocab * response.targets
    local = 2 * (shape.active / shape.layers - shape.hidden * (2 * shape.kv_width + shape.query_width))
    return Work(
        products=3 * logits + local * response.length,
        logits=LOGIT_PASSES * 4 * shape.vocab * response.targets,
        operations=HEAD_OPERATIONS,
    )


def _factor_work(shape: ModelShape, length: int) -> Work:
    """QR factorisations of the inputs of every block's linear layers."""
    each = [2 * length * inside * min(length, inside) for _, inside in _linear_layers(shape)]
    return Work(products=QR_SLOWNESS * shape.layers * sum(each), operations=10 * shape.layers)


def _chunk_work(shape: ModelShape, engine: Engine, tokens: int, n: int) -> Work:
    """A chunk's way back through all blocks."""
    keys = (n + strip_width(n, NARROWEST_QUERIES)) / 2 if engine.by_rules else n
    each = _backward(shape, n, keys=keys, last_is_free=engine.by_rules)
    dense = shape.layers - engine.by_rules
    widths = engine.streams * shape.hidden + engine.gates * shape.mlp_width + engine.scores * shape.heads * keys
    beside = Work(
        moved=4 * dense * tokens * n * widths,
        operations=shape.layers * (engine.operations + engine.token_operations * tokens),
    )
    return each * tokens + beside


def _keeps_probs(shape: ModelShape, response: Response, memory: int) -> bool:
    """Whether attention's probabilities stay from one chunk to the next, as `DecoderBody.keeps_probs` has it."""
    return probs_bytes(shape.layers * shape.heads, response.length + 1) <= memory


def _probs_work(shape: ModelShape, n: int) -> Work:
    """Attention's probabilities of n positions, in all blocks."""
    return Work(
        attention=2 * shape.layers * shape.query_width * n**2,
        moved=PROBS_PASSES * probs_bytes(shape.layers * shape.heads, n),
        operations=PROBS_OPERATIONS * shape.layers,
    )


def measure_bytes(
    shape: ModelShape,
    responses: Sequence[Response],
    *,
    engine: Engine,
    rows: int = 1536,
    memory: int = 1 << 30,
    device: str = "cpu",
    weight_bytes: Number = 4,
) -> dict[str, dict[str, Number]]:
    """What lies in memory at most, by moment and part; weight_bytes: of one parameter."""
    weights = {"weights": weight_bytes * shape.parameters}
    longest = max(response.length for response in responses)
    most = min(max(response.targets for response in responses), max(1, memory // (LOGIT_BYTES * shape.vocab)))
    kept = max(_kept_bytes(shape, engine, r.length, keeps_probs=_keeps_probs(shape, r, memory)) for r in responses)
    cut = {"engine": engine, "rows": rows, "memory": memory, "device": device}
    chunks = (chunk for r in responses for chunk in split_chunks(shape, r.prefixes, **cut))
    carried = (tokens * n * _row_bytes(shape, engine, strip_width(n, NARROWEST_QUERIES)) for tokens, n in chunks)
    chunk = {"response": kept, "chunk": max(carried, default=0)}
    if not engine.by_rules:
        scores = GRAPH_SCORES * shape.heads * longest**2
        chunk["graph"] = shape.layers * (block_activation_bytes(shape, "float32") * longest + 4 * scores)
    return {"head": weights | {"logits": LOGIT_BYTES * shape.vocab * most, "response": kept}, "chunk": weights | chunk}


def _kept_bytes(shape: ModelShape, engine: Engine, length: int, *, keeps_probs: bool) -> Number:
    """Of one response while it is measured: inputs and outputs of linear layers, what is made of them, factors."""
    factors = length * sum(min(length, inside) for inside in (shape.hidden, *(d for _, d in _linear_layers(shape))))
    if not engine.by_rules:
        inputs = 3 * shape.hidden + shape.query_width + shape.mlp_width
        return 4 * shape.layers * (length * inputs + factors)
    seen = 6 * shape.hidden + 2 * shape.query_width + 2 * shape.kv_width + 3 * shape.mlp_width
    made = 2 * shape.hidden + shape.query_width + shape.kv_width + 2 * shape.mlp_width
    # One block's are made and, while they are, its scores.
    probs = probs_bytes((shape.layers if keeps_probs else 2) * shape.heads, length)
    return 4 * shape.layers * (length * (seen + made) + factors) + probs


def _row_bytes(shape: ModelShape, engine: Engine, strip: int = WIDEST) -> Number:
    """Of one token at one position of a chunk."""
    if engine.by_rules:
        return row_bytes(shape.hidden, shape.mlp_width, shape.heads, strip=strip)
    return 4 * (_outputs(shape) + (3 * shape.layers + 1) * shape.hidden)
