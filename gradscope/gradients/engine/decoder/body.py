"""The body of a common decoder, differentiated by analytic backward rules for a few sequences per forward pass.

The rules are used if the blocks consist of the modules in `parts` and, on a short sequence, the norms agree with
autograd's. Other models go through `engine.autograd`, and so does any sequence on which `check` finds a difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from gradscope.gradients.engine.decoder.activations import BlockActivations, Seen, record_blocks
from gradscope.gradients.engine.decoder.block import BlockBackward
from gradscope.gradients.engine.decoder.check import account_for, is_complete
from gradscope.gradients.engine.decoder.parts import DecoderBlock, find_decoder_blocks
from gradscope.gradients.engine.embeddings import TableNorms
from gradscope.gradients.engine.grouping import ROWS, START_PART, Chunk, Limits
from gradscope.gradients.engine.head import HeadPass
from gradscope.gradients.engine.metric import Metric
from gradscope.gradients.engine.norms import square_norms, widths_of
from gradscope.gradients.engine.ownership import Ownership
from gradscope.gradients.engine.products import Product, multiply_exactly
from gradscope.gradients.engine.results import ChunkNorms
from gradscope.gradients.engine.stack import Stack
from gradscope.policy import Policy

OVERHEAD = {"cpu": 6e7, "cuda": 6e10}
"""Overhead of launching a block's backward pass, in FLOPs. cpu: the fastest of several values at S and M in
analyses/benchmarks/token_gradients.py; cuda: an H200's, figures/cost/data/gpu_chunks.csv."""
WEIGHT_ROWS = 16
"""Cost of reading a product's weights, in rows; results are insensitive to a factor of 2."""
FETCHING = 140
"""Cost of fetching an entry shared by tokens, in FLOPs: at S, measuring one token of each of eight sequences together
is a quarter slower for sequences of 256 tokens, and a quarter faster for 64. Assumed for a GPU."""


def chunk_limits(
    weights: int | float,
    hidden: int,
    query: int | float,
    key: int | float,
    mlp: int | float,
    *,
    device: str,
    rows: int | None,
    fit: int,
) -> Limits:
    """Return chunk limits for blocks of `weights` parameters (2·weights FLOPs per row) and these widths.

    query, key: widths of all queries, of all keys. rows: most positions × tokens; None: enough that the start-up cost
    is a small part. fit: the number that fits into memory.
    """
    start = math.ceil(OVERHEAD.get(device, OVERHEAD["cuda"]) / (2 * weights)) + WEIGHT_ROWS
    # Activations and slopes fetched per position, relative to the FLOPs of a row.
    shared = FETCHING * 2 * (hidden + query + key + mlp) / (2 * weights)
    rows = max(ROWS, int(start / START_PART)) if rows is None else rows
    return Limits(min(rows, fit), start, shared)


def row_bytes(hidden: int, mlp: int | float, heads: int, *, device: str = "cpu") -> int | float:
    """Bound the bytes of a token's gradients at one position: in an MLP, or in a strip of attention's queries."""
    return 4 * max(3 * mlp + 6 * hidden, 8 * hidden + 2 * heads * widths_of(device).widest)


def probs_bytes(heads: int, length: int) -> int:
    """Return the bytes of a sequence's attention probabilities. heads: in all blocks, counting capped ones twice."""
    return 4 * heads * length**2


def strip_bytes(heads: int, length: int, *, device: str = "cpu") -> int:
    """Bound the bytes for computing a strip of these probabilities."""
    return 4 * 3 * heads * widths_of(device).widest * length


def seen_bytes(
    hidden: int, query: int | float, key: int | float, mlp: int | float, length: int, *, norms: int
) -> int | float:
    """Return the bytes per sequence recorded in a block's forward pass: its modules' inputs and outputs.

    query, key: widths of all queries, of all keys. norms: number of norms of width `hidden`.
    """
    return 4 * length * ((4 + norms) * hidden + 2 * query + 2 * key + 3 * mlp)


def kept_bytes(
    hidden: int, query: int | float, key: int | float, mlp: int | float, length: int, *, norms: int
) -> int | float:
    """Return the bytes kept for the backward pass (activations and factors), without attention probabilities."""
    factors = sum(min(length, inside) for inside in (hidden, hidden, query, mlp))
    return 4 * length * (norms * hidden + 2 * (query + key + mlp) + factors)


def block_bytes(
    hidden: int, query: int | float, key: int | float, mlp: int | float, length: int, *, norms: int
) -> int | float:
    """Bound the bytes per sequence of a block's activations, both as recorded and as kept."""
    widths = hidden, query, key, mlp
    return max(seen_bytes(*widths, length, norms=norms), kept_bytes(*widths, length, norms=norms))


def most_sequences(length: int, kept: int | float, *, rows: int, logits: int, memory: int) -> int:
    """Return how many sequences of this length fit together: a token of each within the rows, and their logits and
    activations within the memory.

    kept: bytes kept per sequence; logits: positions whose logits fit.
    """
    return int(min(rows // length, logits // length, memory // kept))


class DecoderBody:
    """Measures the body of a common decoder; created by `find`.

    table: name of the embedding. memory: bytes for each of: the kept activations of all blocks, the kept attention
    probabilities, the activations of stacked sequences, the gradients between two blocks.
    """

    def __init__(
        self, policy: Policy, ownership: Ownership, blocks: list[DecoderBlock], table: str, memory: int
    ) -> None:
        self.model, self.ownership, self.blocks, self.table, self.memory = (
            policy.model,
            ownership,
            blocks,
            table,
            memory,
        )
        self.multiply: Product = multiply_exactly
        """Matrix product of gradients with weights, activations and factors."""
        self.metric: Metric | None = None
        """Scales of the gradients, if scaled norms are measured too."""

    @classmethod
    def find(cls, policy: Policy, ownership: Ownership, split_point: str | None, memory: int) -> DecoderBody | None:
        """Return the body if its blocks are a common decoder's on one device and the head comes next; else None."""
        if len({parameter.device for parameter in policy.model.parameters()}) > 1:
            return None  # autograd handles several devices
        blocks = find_decoder_blocks(policy.model, policy.blocks, ownership)
        tables = [name for name, rule in ownership.rules.items() if rule == "embedding"]
        if blocks is None or len(tables) != 1 or split_point != blocks[-1].output.name:
            return None
        return cls(policy, ownership, blocks, tables[0], memory)

    def recording(self, stack: Stack) -> AbstractContextManager[list[Seen]]:
        """Record the blocks' activations in the head's forward pass; if they do not fit, only the blocks' inputs."""
        keeps = self.keeps_blocks(*stack.ids.shape)
        return record_blocks(self.model, self.blocks, None if keeps else self._accountant())

    def follow(self, stack: Stack, head: HeadPass, seen: list[Seen]) -> DecoderStack | None:
        """Return the sequences after the head's forward pass; None if the blocks did something the rules do not cover.

        Consumes `seen` block by block, to free what is no longer needed.
        """
        if not self.keeps_blocks(*stack.ids.shape):
            if not torch.stack([one.accounted for one in seen]).all():
                return None
            attention = getattr(self.model.config, "_attn_implementation", None)
            return DecoderStack(self, stack, head, partial(self._make_again, seen, attention), self._wave_rows)
        if not all(map(is_complete, self.blocks, seen)):
            return None
        batch, length = stack.ids.shape
        keep = batch * probs_bytes(sum(map(_heads, self.blocks)), length) <= self.memory
        activations, consistent = [], []
        tokens = -(-len(stack.positions) // len(stack.ids))
        for block in self.blocks:
            one = BlockActivations(block, seen.pop(0), keep_probs=keep)
            consistent.append(account_for(one, seen[0].hidden.to(one.dtype) if seen else None))
            one.prepare(tokens, last=not seen, keep_inputs=self.metric is not None)
            activations.append(one)
        activations.reverse()
        known = bool(torch.stack(consistent).all())
        return DecoderStack(self, stack, head, lambda _tokens: iter(activations)) if known else None

    def _accountant(self) -> Callable[[DecoderBlock, Seen, Tensor], None]:
        """Return a callback that checks each finished block, in order, and frees its tensors."""
        before: Tensor | None = None

        @torch.no_grad()
        def account(block: DecoderBlock, seen: Seen, output: Tensor) -> None:
            nonlocal before
            seen.accounted = torch.tensor(False, device=output.device)
            if is_complete(block, seen):
                one, last = BlockActivations(block, seen, keep_probs=False), block is self.blocks[-1]
                seen.accounted = account_for(one, None if last else output.to(one.dtype))
            if before is not None:  # Nothing may happen between two blocks.
                seen.accounted &= (seen.hidden == before).all()
            before = output
            seen.let_go()

        return account

    def _make_again(self, seen: list[Seen], attention: str | None, tokens: int) -> Iterator[BlockActivations]:
        """Yield the blocks' activations, last block first, recomputed from their inputs for `tokens` per sequence."""
        for block, one in zip(reversed(self.blocks), reversed(seen), strict=True):
            self.model.config._attn_implementation = attention  # passes of other lengths may have changed it
            with record_blocks(self.model, [block]) as (again,):
                one.call.again(self.model.get_submodule(block.name), one.hidden)
            keep = probs_bytes(_heads(block), one.hidden.shape[1]) * len(one.hidden) <= self.memory
            made = BlockActivations(block, again, keep_probs=keep)
            del again
            made.prepare(tokens, last=block is self.blocks[-1], keep_inputs=self.metric is not None)
            yield made
            del made

    @property
    def _wave_rows(self) -> int:
        """Return how many positions × tokens of gradients between two blocks fit into memory."""
        return self.memory // (4 * self._widths[0])

    def limits(self, rows: int | None, memory: int) -> Limits:
        """Return chunk limits. rows: most positions × tokens, or None (`chunk_limits`); memory: their bytes."""
        weights = max(sum(matrix.module.weight.numel() for matrix in block.matrices) for block in self.blocks)
        fit = max(1, memory // self.bytes_per_row)
        return chunk_limits(weights, *self._widths, device=self.model.device.type, rows=rows, fit=fit)

    @property
    def _widths(self) -> tuple[int, int, int, int]:
        """Return the widths of the residual stream, of all queries, of all keys and of the MLP."""
        block = self.blocks[0]
        mlp, hidden = block.gate.module.weight.shape
        return hidden, block.query.module.out_features, block.key.module.out_features, mlp

    @property
    def bytes_per_row(self) -> int:
        hidden = max(block.query.module.in_features for block in self.blocks)
        mlp = max(block.down.module.in_features for block in self.blocks)
        heads = max(block.heads for block in self.blocks)
        return row_bytes(hidden, mlp, heads, device=self.model.device.type)

    def keeps_blocks(self, batch: int, length: int) -> bool:
        """Return whether the activations of all blocks are kept."""
        each = block_bytes(*self._widths, length, norms=self._norms)
        return batch * len(self.blocks) * each <= self.memory

    @property
    def _norms(self) -> int:
        """Return the number of a block's norms that have the residual stream's width."""
        return len(self.blocks[0].norms) - len(self.blocks[0].head_norms)

    def most_sequences(self, length: int, *, rows: int, logits: int) -> int:
        """Return how many sequences of this length fit together; see the function `most_sequences`."""
        kept = len(self.blocks) * seen_bytes(*self._widths, length, norms=self._norms)
        kept += probs_bytes(sum(map(_heads, self.blocks)), length)
        return most_sequences(length, kept, rows=rows, logits=logits, memory=self.memory)


def _heads(block: DecoderBlock) -> int:
    """Return a block's number of heads, as counted by `probs_bytes`."""
    return block.heads * (1 if block.cap is None else 2)


@dataclass(frozen=True)
class DecoderStack:
    """Sequences that a DecoderBody measures."""

    body: DecoderBody
    stack: Stack
    head: HeadPass
    backwards: Callable[[int], Iterator[BlockActivations]]
    """Number of tokens per sequence → the blocks' activations, last block first."""
    wave_rows: int = 0
    """Positions × tokens of chunks carried through a block together; 0: one chunk at a time."""

    @torch.no_grad()
    def measure(self, chunks: Sequence[Chunk]) -> list[ChunkNorms]:
        """Measure ‖δ_ℓ‖ for ℓ = 0 … L − 1, and squared gradient norms; undefined at empty places."""
        carried = [_Carried(self, chunk) for chunk in chunks]
        for activations in self.backwards(sum(chunk.picks.shape[1] for chunk in chunks)):
            for one in carried:
                one.carry(activations)
            del activations  # before the next one is made
        return [one.measured() for one in carried]


class _Carried:
    """The gradients of a chunk of tokens, and the norms measured so far."""

    def __init__(self, of: DecoderStack, chunk: Chunk) -> None:
        self._of, self._chunk = of, chunk
        self._delta: Tensor | None = None
        self._squares: dict[str, Tensor] = {}
        self._scaled: list[Tensor] = []
        self._layers: list[Tensor] = []

    def carry(self, activations: BlockActivations) -> None:
        """Carry the gradients from a block's output to its input."""
        body, chunk = self._of.body, self._chunk
        backward = BlockBackward(activations, len(chunk.picks), chunk.length, body.multiply, body.metric)
        if self._delta is None:
            residual, attended = (rows[chunk.picks] for rows in self._of.head.split_cotangents)
            self._delta = backward.through_attention_at(residual, attended, chunk.positions)
        else:
            self._delta = backward.through_block(self._delta)
        self._squares |= backward.squares
        self._scaled += backward.scaled
        self._layers.append(square_norms(self._delta).sqrt())

    def measured(self) -> ChunkNorms:
        """Return the norms, including the embedding's, where the gradients have arrived."""
        body, head, (batch, _) = self._of.body, self._of.head, (picks := self._chunk.picks).shape
        ids, table = self._of.stack.ids[:batch, : self._chunk.length], body.model.get_submodule(body.table)
        norms = TableNorms(body.ownership, body.table, table, head)
        squares = self._squares | {body.table: norms.squares(ids, self._delta, picks)}
        scaled = self._scaled
        if body.metric is not None:
            scaled = [*scaled, norms.squares(ids, self._delta, picks, body.metric)]
        return ChunkNorms(torch.stack(self._layers[::-1], 2), squares, sum(scaled) if scaled else None)
