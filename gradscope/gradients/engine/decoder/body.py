"""The body of a common decoder, by backward rules instead of autograd: one forward pass serves a few sequences.

A body is common if its blocks are those of `parts` and if, on a short sequence, the rules give the norms that
its graph gives; any other goes by `engine.autograd`, and so does a sequence on which `check` finds a difference.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from gradscope.gradients.engine.chunks import ROWS, START_PART, Chunk, Limits
from gradscope.gradients.engine.decoder.activations import BlockActivations, Seen, record_blocks
from gradscope.gradients.engine.decoder.block import BlockBackward
from gradscope.gradients.engine.decoder.check import account_for, is_complete
from gradscope.gradients.engine.decoder.parts import DecoderBlock, find_decoder_blocks
from gradscope.gradients.engine.embeddings import TableNorms
from gradscope.gradients.engine.head import HeadPass
from gradscope.gradients.engine.metric import Metric
from gradscope.gradients.engine.norms import WIDEST, square_norms
from gradscope.gradients.engine.ownership import Ownership
from gradscope.gradients.engine.products import Product, multiply_exactly
from gradscope.gradients.engine.results import Measured
from gradscope.gradients.engine.stack import Stack
from gradscope.policy import Policy

OVERHEAD = {"cpu": 6e7, "cuda": 6e10}
"""FLOPs that a device could do in the time that the operations of a block's backward pass take to start. cpu: of some
values the fastest at S and M of analyses/benchmarks/token_gradients.py; cuda: figures/gpu_chunks.csv, of an H200."""
WEIGHT_ROWS = 16
"""Rows of a product assumed to take as long as reading its weights; half or twice as many cost the same."""
FETCHING = 140
"""FLOPs that a device could do in the time in which it fetches a number that tokens share: at S, sequences of 256
tokens are slower by a quarter if eight are together with one token each, and those of 64 faster by a quarter. Of a GPU
it is assumed."""


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

    query, key: of all queries, of all keys. rows: most positions × tokens; None: as many as it takes for starting a
    chunk to be a small part of it. fit: as many fit the memory.
    """
    start = math.ceil(OVERHEAD.get(device, OVERHEAD["cuda"]) / (2 * weights)) + WEIGHT_ROWS
    # Activations and slopes of each kind at a position, in parts of the FLOPs that a row takes.
    shared = FETCHING * 2 * (hidden + query + key + mlp) / (2 * weights)
    rows = max(ROWS, int(start / START_PART)) if rows is None else rows
    return Limits(min(rows, fit), start, shared)


def row_bytes(hidden: int, mlp: int | float, heads: int, *, strip: int = WIDEST) -> int | float:
    """Return the most bytes that one token carries at one position: through an MLP, or a strip of attention's queries.
    """
    return 4 * max(3 * mlp + 6 * hidden, 8 * hidden + 2 * heads * strip)


def probs_bytes(heads: int, length: int) -> int:
    """Return the bytes of attention's probabilities of a sequence. heads: of all blocks together, capped ones twice."""
    return 4 * heads * length**2


def seen_bytes(
    hidden: int, query: int | float, key: int | float, mlp: int | float, length: int, *, norms: int
) -> int | float:
    """Return the bytes per sequence that a block's forward pass leaves: its modules' inputs and outputs.

    query, key: widths of all queries, of all keys. norms: of width `hidden`.
    """
    return 4 * length * ((4 + norms) * hidden + 2 * query + 2 * key + 3 * mlp)


def kept_bytes(
    hidden: int, query: int | float, key: int | float, mlp: int | float, length: int, *, norms: int
) -> int | float:
    """Return the bytes kept for the backward pass: the activations and factors that the rules need.

    Attention's probabilities are not in it.
    """
    factors = sum(min(length, inside) for inside in (hidden, hidden, query, mlp))
    return 4 * length * (norms * hidden + 2 * (query + key + mlp) + factors)


def most_sequences(length: int, kept: int | float, *, rows: int, logits: int, memory: int) -> int:
    """Return how many sequences of this length fit: one token of each within the rows, all their logits and what they
    leave within the memory.

    kept: bytes that one leaves; logits: positions whose logits fit.
    """
    return int(min(rows // length, logits // length, memory // kept))


class DecoderBody:
    """Measures the body of a common decoder; `find` makes it.

    table: name of the embedding. memory: bytes that attention's probabilities may take if they are to be kept from one
    chunk of tokens to the next, and that sequences beside one another may leave.
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
        """Matrix product of what flows back with weights, activations and factors."""
        self.metric: Metric | None = None
        """Scales of gradients, where their norms are asked for, too."""

    @classmethod
    def find(cls, policy: Policy, ownership: Ownership, split_point: str | None, memory: int) -> DecoderBody | None:
        """Return the body, if its blocks are a common decoder's on one device and the head begins at the last one's
        output; else None.
        """
        if len({parameter.device for parameter in policy.model.parameters()}) > 1:
            return None  # the graph finds its way between devices by itself
        blocks = find_decoder_blocks(policy.model, policy.blocks, ownership)
        tables = [name for name, rule in ownership.rules.items() if rule == "embedding"]
        if blocks is None or len(tables) != 1 or split_point != blocks[-1].output.name:
            return None
        return cls(policy, ownership, blocks, tables[0], memory)

    def follow(self, stack: Stack, head: HeadPass, seen: list[Seen]) -> DecoderStack | None:
        """Return the sequences after the head's forward pass; None if the blocks did anything that the rules do not
        cover.

        Takes from `seen` block by block, so that what is not needed any more does not stay.
        """
        if not all(map(is_complete, self.blocks, seen)):
            return None
        keep, activations, consistent = self.keeps_probs(*stack.ids.shape), [], []
        for block in self.blocks:
            one = BlockActivations(block, seen.pop(0), keep_probs=keep)
            consistent.append(account_for(one, seen[0].hidden.to(one.dtype) if seen else None))
            one.prepare(last=not seen, keep_inputs=self.metric is not None)
            activations.append(one)
        return DecoderStack(self, stack, head, activations) if bool(torch.stack(consistent).all()) else None

    def recording(self) -> AbstractContextManager[list[Seen]]:
        """Return a context in which the head's forward pass records the blocks' activations."""
        return record_blocks(self.model, self.blocks)

    def limits(self, rows: int | None, memory: int) -> Limits:
        """Return chunk limits. rows: most positions × tokens, or None (`chunk_limits`); memory: bytes that they may
        take.
        """
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
        return row_bytes(hidden, mlp, max(block.heads for block in self.blocks))

    @property
    def _heads(self) -> int:
        """Return the number of heads of all blocks, as `probs_bytes` counts them."""
        return sum(block.heads * (1 if block.cap is None else 2) for block in self.blocks)

    def keeps_probs(self, batch: int, length: int) -> bool:
        return batch * probs_bytes(self._heads, length) <= self.memory

    def most_sequences(self, length: int, *, rows: int, logits: int) -> int:
        """Return how many sequences of this length fit; see the module's function."""
        norms = len(self.blocks[0].norms) - len(self.blocks[0].head_norms)
        kept = len(self.blocks) * seen_bytes(*self._widths, length, norms=norms) + probs_bytes(self._heads, length)
        return most_sequences(length, kept, rows=rows, logits=logits, memory=self.memory)


@dataclass(frozen=True)
class DecoderStack:
    """Sequences that a DecoderBody measures."""

    body: DecoderBody
    stack: Stack
    head: HeadPass
    activations: list[BlockActivations]

    @torch.no_grad()
    def measure(self, chunk: Chunk) -> Measured:
        """Measure ‖δ_ℓ‖ for ℓ = 0 … L − 1, and squared gradient norms; undefined at places without a token."""
        body, picks, squares, scaled, layers = self.body, chunk.picks, {}, [], []
        residual, attended = (rows[picks] for rows in self.head.split_cotangents)
        batch, delta = len(picks), None
        for activations in reversed(self.activations):
            backward = BlockBackward(activations, batch, chunk.length, body.multiply, body.metric)
            if delta is None:
                delta = backward.through_attention_at(residual, attended, chunk.positions)
            else:
                delta = backward.through_block(delta)
            squares |= backward.squares
            scaled += backward.scaled
            layers.append(square_norms(delta).sqrt())
        ids, table = self.stack.ids[:batch, : chunk.length], body.model.get_submodule(body.table)
        norms = TableNorms(body.ownership, body.table, table, self.head)
        squares[body.table] = norms.squares(ids, delta, picks)
        if body.metric is not None:
            scaled.append(norms.squares(ids, delta, picks, body.metric))
        return Measured(torch.stack(layers[::-1], 2), squares, sum(scaled) if scaled else None)
