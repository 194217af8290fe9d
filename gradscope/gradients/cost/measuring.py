"""FLOPs, bytes and operations of exact token gradients: the least that they take, and what the engine does beside it.

A token whose logits stand at position p has a gradient at the n = p + 1 positions of its prefix. The least is to carry
it back through every block over that prefix, and to turn what arrives at each linear layer into the norm of its
weight's gradient, ‖Σ_s δ_s a_sᵀ‖. The last block is nearly free: up to its attention's values, δ lives at p alone.

Blocks are those of `gradscope.gradients.cost.model`, without biases. All counts are sums over the tokens or chunks of a
batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gradscope.gradients.checked_tokens import CHECKED_EACH, LIGHT
from gradscope.gradients.cost.model import ModelShape, Piece, block_activation_bytes
from gradscope.gradients.cost.speed import Work, total
from gradscope.gradients.cost.training import forward_work
from gradscope.gradients.engine.chunks import ROWS, Limits, Run, group_sequences, neighbours
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


@dataclass(frozen=True)
class Engine:
    """What an engine does for each block and chunk of K tokens over n positions, beside its products.

    All but `trials` is counted by analyses/benchmarks/work_counts.py, and held to it by a test.
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
    trials: Number
    """Forward passes over a trial sequence that take as long as trying the model's structure on it: fitted to times."""
    by_rules: bool
    """Whether it goes by backward rules: then one forward pass serves a few responses, the last block is nearly free,
    and each strip of queries has the keys up to its end. Else every chunk has a forward pass, and all is dense but for
    what follows the last block's attention."""


RULES = Engine(55, 6.3, 5, 118, 0, trials=20, by_rules=True)
"""Backward rules, of a common decoder's block."""
GRAPH = Engine(96, 11, 8.9, 235, 2.5, trials=8, by_rules=False)
"""The model's own graph, whatever its blocks are."""

IN_PYTHON = 4
"""An operation of a pass that is recorded takes so many times as long to start as the probe's: fitted to times."""
STATISTICS_PASSES, LOGIT_PASSES, HEAD_OPERATIONS = 32, 45, 128 * IN_PYTHON
"""Arrays of logits that a token's statistics read and write, and those that a measured token's head does, and
operations for each pass; counted by work_counts, like the next four."""
SETTLED_STREAMS, SETTLED_GATES, SETTLED_SCORES, SETTLED_OPERATIONS = 103, 23.5, 8.3, 98 * IN_PYTHON
"""What trying one block's activations for the analytic backward pass touches: arrays of hidden and of the MLP's width
at each position, of its scores, operations."""
WHOLE_PASSES, CHECK_PASSES = 1.5, 6
"""Forward passes over the longest response that finding the structure makes; those that take as long as the self-check
of a token: measured."""
LIGHT_PASSES, LIGHT_START = 3, 2
"""The same of a token of a light self-check, over the shortest prefix, and of what its tokens share."""
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
    rows: int | None = None,
    memory: int = 1 << 30,
    device: str = "cpu",
    self_check: bool = True,
) -> dict[str, Work]:
    """What measuring these responses takes, by part. rows, memory: chunk_rows and chunk_memory of `measure`."""
    work = {name: [] for name in ("preparation", "forward", "head", "factors", "backward", "norms")}
    cut = {"engine": engine, "rows": rows, "memory": memory, "device": device}
    length = max(response.length for response in responses)
    longest, trial = forward_work(shape, Piece(1, length, 0)), min(TRIAL, length)
    work["preparation"].append(longest * WHOLE_PASSES)
    if self_check:
        work["preparation"].append(_check_work(shape, responses, longest))
    work["preparation"].append(forward_work(shape, Piece(1, trial, trial)) * engine.trials)
    for group in group_responses(shape, responses, **cut):
        runs, length = list(split_chunks(shape, group, **cut)), max(response.reach for response in group)
        # For the statistics, which find the intervals; for the head, which the rules share; along the graph each chunk.
        pieces = [Piece(1, response.length, 0) for response in group]
        pieces += [Piece(len(group), length, 0)] if runs else []
        pieces += [] if engine.by_rules else [Piece(1, run.length, 0) for run in runs]
        work["forward"] += [forward_work(shape, piece) for piece in pieces]
        work["head"].append(_head_work(shape, group))
        if runs:
            work["factors"].append(_factor_work(shape, len(group), length))
        work["backward"] += [_chunk_work(shape, engine, run) for run in runs]
        if engine.by_rules and runs:
            work["factors"].append(_settled_work(shape, len(group), length))
            if not _keeps_probs(shape, group, memory):
                work["backward"] += [_probs_work(shape, len(run.tokens), run.length) for run in runs]
        norms = (run.places * _norms(shape, run.length, last_is_free=engine.by_rules, cut=True) for run in runs)
        work["norms"].append(Work(products=sum(norms)))
    return {name: total(parts) for name, parts in work.items()}


def _check_work(shape: ModelShape, responses: Sequence[Response], longest: Work) -> Work:
    """The self-check's."""
    passes, light = _check_passes(shape, responses)
    prefixes = [prefix for response in responses for prefix in response.prefixes]
    return (forward_work(shape, Piece(1, min(prefixes), 0)) if light else longest) * passes


def _check_passes(shape: ModelShape, responses: Sequence[Response]) -> tuple[Number, bool]:
    """Forward passes that the self-check takes, and whether it is light: of few tokens with short prefixes."""
    prefixes = [prefix for response in responses for prefix in response.prefixes]
    count = min(CHECKED, len(prefixes))
    if 6 * shape.parameters * count * sum(prefixes) <= LIGHT * max(1, len(prefixes)):
        return CHECK_PASSES * count, False
    return LIGHT_START + LIGHT_PASSES * min(CHECKED // CHECKED_EACH, len(prefixes)), True


def upcast_work(
    shape: ModelShape,
    responses: Sequence[Response],
    *,
    engine: Engine,
    rows: int | None,
    memory: int,
    device: str,
    self_check: bool = True,
) -> Work:
    """Work of upcasting half-precision weights where they are used: once in each pass of `measure_work`, forward or
    back."""
    cut = {"engine": engine, "rows": rows, "memory": memory, "device": device}
    groups = group_responses(shape, responses, **cut)
    runs = sum(1 for group in groups for _ in split_chunks(shape, group, **cut))
    # Twice of a run along the graph, which goes forward, too; of the head's pass both ways.
    passes = len(responses) + 2 * len(groups) + (1 if engine.by_rules else 2) * runs
    passes += WHOLE_PASSES + (_check_passes(shape, responses)[0] if self_check else 0)
    return Work(moved=(2 + 4) * shape.parameters * passes)


def group_responses(
    shape: ModelShape, responses: Sequence[Response], *, engine: Engine, rows: int | None, memory: int, device: str
) -> list[list[Response]]:
    """Those that the engine measures together, in the order that it takes them in."""
    limits = find_limits(shape, engine=engine, rows=rows, memory=memory, device=device)

    def most(length: int) -> int:
        kept = _seen_bytes(shape, engine, length) + probs_bytes(shape.layers * shape.heads, length)
        return most_sequences(length, kept, rows=limits.rows, logits=logit_rows(shape.vocab, memory), memory=memory)

    lengths, reaches = [response.prefixes for response in responses], [response.reach for response in responses]
    groups = group_sequences(lengths, reaches, limits, most=most)
    return [[responses[index] for index in group] for group in groups]


def split_chunks(
    shape: ModelShape, group: Sequence[Response], *, engine: Engine, rows: int | None, memory: int, device: str
) -> Iterator[Run]:
    """The chunks of responses that are measured together, as the engine cuts them."""
    limits = find_limits(shape, engine=engine, rows=rows, memory=memory, device=device)
    return neighbours([response.prefixes for response in group], limits)


def find_limits(shape: ModelShape, *, engine: Engine, rows: int | None, memory: int, device: str) -> Limits:
    """Chunk limits, as the engine has them."""
    row = int(_row_bytes(shape, engine))
    if not engine.by_rules:
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


def _head_work(shape: ModelShape, group: Sequence[Response]) -> Work:
    """Logits of all targets for the statistics; of those that are measured once more, with their gradient, which goes
    back through the last MLP."""
    targets, length = sum(response.targets for response in group), max(response.reach for response in group)
    measured = sum(len(response.prefixes) for response in group)
    logits = 2 * shape.hidden * shape.vocab
    local = 2 * (shape.active / shape.layers - shape.hidden * (2 * shape.kv_width + shape.query_width))
    return Work(
        products=logits * (targets + 2 * measured) + local * len(group) * length,
        logits=4 * shape.vocab * (STATISTICS_PASSES * targets + LOGIT_PASSES * measured),
        operations=HEAD_OPERATIONS,
    )


def _factor_work(shape: ModelShape, batch: int, length: int) -> Work:
    """QR factorisations of the inputs of every block's linear layers."""
    each = [2 * batch * length * inside * min(length, inside) for _, inside in _linear_layers(shape)]
    return Work(products=QR_SLOWNESS * shape.layers * sum(each), operations=10 * shape.layers)


def _settled_work(shape: ModelShape, batch: int, length: int) -> Work:
    """Activations as the rules need them, attention's probabilities among them, and whether they are the block's."""
    widths = SETTLED_STREAMS * shape.hidden + SETTLED_GATES * shape.mlp_width + SETTLED_SCORES * shape.heads * length
    return Work(
        attention=4 * shape.layers * shape.query_width * batch * length**2,
        moved=4 * shape.layers * batch * length * widths,
        operations=SETTLED_OPERATIONS * shape.layers,
    )


def _chunk_work(shape: ModelShape, engine: Engine, run: Run) -> Work:
    """A chunk's way back through all blocks."""
    tokens, n = run.places, run.length
    keys = (n + strip_width(n, NARROWEST_QUERIES)) / 2 if engine.by_rules else n
    each = _backward(shape, n, keys=keys, last_is_free=engine.by_rules)
    dense = shape.layers - engine.by_rules
    widths = engine.streams * shape.hidden + engine.gates * shape.mlp_width + engine.scores * shape.heads * keys
    beside = Work(
        moved=4 * dense * tokens * n * widths,
        operations=shape.layers * (engine.operations + engine.token_operations * tokens),
    )
    return each * tokens + beside


def _keeps_probs(shape: ModelShape, group: Sequence[Response], memory: int) -> bool:
    """Whether attention's probabilities stay from one chunk to the next, as `DecoderBody.keeps_probs` has it."""
    longest = max(response.reach for response in group)
    return len(group) * probs_bytes(shape.layers * shape.heads, longest) <= memory


def _probs_work(shape: ModelShape, batch: int, n: int) -> Work:
    """Attention's probabilities of n positions, in all blocks."""
    return Work(
        attention=2 * shape.layers * shape.query_width * batch * n**2,
        moved=PROBS_PASSES * batch * probs_bytes(shape.layers * shape.heads, n),
        operations=PROBS_OPERATIONS * shape.layers,
    )


def measure_bytes(
    shape: ModelShape,
    responses: Sequence[Response],
    *,
    engine: Engine,
    rows: int | None = None,
    memory: int = 1 << 30,
    device: str = "cpu",
    weight_bytes: Number = 4,
) -> dict[str, dict[str, Number]]:
    """What lies in memory at most, by moment and part; weight_bytes: of one parameter."""
    weights = {"weights": weight_bytes * shape.parameters}
    longest = max(response.reach for response in responses)
    cut = {"engine": engine, "rows": rows, "memory": memory, "device": device}
    groups = group_responses(shape, responses, **cut)
    most = min(max(map(_logit_positions, groups)), logit_rows(shape.vocab, memory))
    kept = max(
        len(group)
        * _kept_bytes(shape, engine, max(r.reach for r in group), keeps_probs=_keeps_probs(shape, group, memory))
        for group in groups
    )
    runs = (run for group in groups for run in split_chunks(shape, group, **cut))
    carried = (run.rows * _row_bytes(shape, engine, strip_width(run.length, NARROWEST_QUERIES)) for run in runs)
    chunk = {"response": kept, "chunk": max(carried, default=0)}
    if not engine.by_rules:
        scores = GRAPH_SCORES * shape.heads * longest**2
        chunk["graph"] = shape.layers * (block_activation_bytes(shape, "float32") * longest + 4 * scores)
    seen = max(len(group) * _seen_bytes(shape, engine, max(r.reach for r in group)) for group in groups)
    return {"head": weights | {"logits": LOGIT_BYTES * shape.vocab * most, "response": seen}, "chunk": weights | chunk}


def _logit_positions(group: Sequence[Response]) -> int:
    """Positions, over all responses, that predict a measured token of one of them."""
    return len(group) * len({prefix for response in group for prefix in response.prefixes})


def _seen_bytes(shape: ModelShape, engine: Engine, length: int) -> Number:
    """What a forward pass leaves of one response: inputs of linear layers and, for the rules, their outputs."""
    if not engine.by_rules:
        return 4 * shape.layers * length * (3 * shape.hidden + shape.query_width + shape.mlp_width)
    return shape.layers * seen_bytes(*_widths(shape), length)


def _kept_bytes(shape: ModelShape, engine: Engine, length: int, *, keeps_probs: bool) -> Number:
    """What of it is kept while its tokens are measured, and what is made of it."""
    if not engine.by_rules:
        factors = sum(min(length, inside) for inside in (shape.hidden, *(d for _, d in _linear_layers(shape))))
        return _seen_bytes(shape, engine, length) + 4 * shape.layers * length * factors
    # One block's are made and, while they are, its scores.
    probs = probs_bytes((shape.layers if keeps_probs else 2) * shape.heads, length)
    return shape.layers * kept_bytes(*_widths(shape), length) + probs


def _widths(shape: ModelShape) -> tuple[Number, Number, Number, Number]:
    """Widths of the residual stream, of all queries, of all keys and of the MLP."""
    return shape.hidden, shape.query_width, shape.kv_width, shape.mlp_width


def _row_bytes(shape: ModelShape, engine: Engine, strip: int = WIDEST) -> Number:
    """Bytes of one token at one position of a chunk."""
    if engine.by_rules:
        return row_bytes(shape.hidden, shape.mlp_width, shape.heads, strip=strip)
    return 4 * (_outputs(shape) + (3 * shape.layers + 1) * shape.hidden)
