"""Activations of a common decoder's blocks from one forward pass, as the backward rules need them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gradscope.gradients.attention import Band
from gradscope.gradients.engine.decoder.parts import DecoderBlock, Matrix, Norm
from gradscope.gradients.engine.norms import prefix_factor
from gradscope.gradients.engine.recording import block_input
from gradscope.gradients.hooks import forward_hooks


@dataclass
class Seen:
    """One block's forward pass over B sequences of n positions."""

    hidden: Tensor | None = None
    """[B, n, d]: the block's input."""
    inputs: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    """By module."""
    rotary: tuple[Tensor, ...] = ()
    """(cos, sin), [1 or B, n, c] each."""
    mask: Any = None
    """Attention's, [1 or B, 1 or H, n, n]: added to the scores, or True where a key is seen; None: causal; a
    Band, where attention goes in strips. Or a thing of another kind, which is not understood."""

    def put_positions_first(self, head_norms: list[str]) -> None:
        """Give norms of heads the layout [B, n, heads, c], if they were called with [B, heads, n, c]."""
        for values in (self.inputs, self.outputs):
            for name in values.keys() & {*head_norms}:
                if values[name].ndim == 4 and values[name].shape[1] != self.hidden.shape[1]:
                    values[name] = values[name].transpose(1, 2)


@contextmanager
def record_blocks(model: nn.Module, blocks: list[DecoderBlock]) -> Iterator[list[Seen]]:
    """Record a forward pass through the blocks."""
    seen = [Seen() for _ in blocks]
    owner = {part.name: s for b, s in zip(blocks, seen, strict=True) for part in (*b.matrices, *b.norms)}
    head_norms = {b.name: [norm.name for norm in b.head_norms] for b in blocks}
    by_block = {b.name: s for b, s in zip(blocks, seen, strict=True)}
    by_attention = {b.attention: s for b, s in zip(blocks, seen, strict=True)}

    def leave(name: str, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if name in by_block:
            by_block[name].hidden = block_input(args, kwargs).detach()
            by_block[name].put_positions_first(head_norms[name])
        elif name in by_attention:
            angles = kwargs.get("position_embeddings")
            angles = angles if isinstance(angles, (tuple, list)) else ()
            by_attention[name].rotary = tuple(a.detach() for a in angles if isinstance(a, Tensor))
            by_attention[name].mask = kwargs.get("attention_mask")
        elif name not in owner[name].inputs:  # A norm of the head is called again, with other weights, for its slopes.
            owner[name].inputs[name], owner[name].outputs[name] = args[0].detach(), output.detach()

    with forward_hooks(model, [*owner, *by_block, *by_attention], leave):
        yield seen


class BlockActivations:
    """One block's activations over B sequences, with all that their prefixes share of a backward pass.

    Tensors are [B, n, …] over the whole sequences, with an axis [B, n, 1, …] for tokens where they meet what flows
    back; float32, or float64 of such a policy.
    keep_probs: hold attention's probabilities, B · H · n² numbers (of capped scores twice as many), instead of making
    them for every chunk of tokens.
    """

    def __init__(self, block: DecoderBlock, seen: Seen, *, keep_probs: bool) -> None:
        self.block, self._seen = block, seen
        self.model_dtype = seen.hidden.dtype
        self.dtype = torch.promote_types(self.model_dtype, torch.float32)
        self.hidden = seen.hidden.to(self.dtype)
        self.attention_norm = block.attention_norm.normalize(self.hidden)
        self.mlp_norm = block.mlp_norm.normalize(self.inputs(block.mlp_norm))
        ends = block.attention_end, block.mlp_end
        self.attention_end, self.mlp_end = (n and n.normalize(self.inputs(n)) for n in ends)
        angles = (angle.to(self.dtype).expand(len(self.hidden), -1, -1) for angle in seen.rotary)
        self.cos, self.sin = (angle[:, :, None, None] for angle in angles)
        self.query_norm, self.queries = self._rotated_heads(block.query, block.query_norm)
        self.key_norm, self.keys = self._rotated_heads(block.key, block.key_norm)
        self.values = self._heads(self.outputs(block.value))
        self.attended = self._heads(self.inputs(block.output))
        gate = self.outputs(block.gate).detach().requires_grad_(True)
        with torch.enable_grad():
            activated = block.activation(gate)
        slope = torch.autograd.grad(activated, gate, torch.ones_like(activated))[0]
        self.gate_slope, self.activated = (slope * self.outputs(block.up))[:, :, None], activated.detach()[:, :, None]
        """Slopes of activation(gate) ∘ up: by gate, and by up, which is activation(gate); [B, n, 1, MLP's width]."""
        self._factors: dict[tuple[str, bool], Tensor] = {}
        self._kept = self._attend(*self.queries.shape[:2]) if keep_probs else None

    def prepare(self, *, last: bool, keep_inputs: bool = False) -> None:
        """Compute what the backward pass needs and free the rest. last: the last block, where only keys and values have
        gradients over the whole prefix. keep_inputs: of all matrices, whose gradients will be formed.
        """
        for matrix in (self.block.key, self.block.value) if last else self.block.matrices:
            self.factor(matrix, 1)
        kept = [self.block.query.name] if last else []
        kept = [matrix.name for matrix in self.block.matrices] if keep_inputs else kept
        self._seen = Seen(inputs={name: self._seen.inputs[name] for name in kept}, mask=self._seen.mask)
        del self.hidden
        if last:
            del self.mlp_norm, self.gate_slope, self.activated, self.attention_end, self.mlp_end

    def attention(self, batch: int, n: int) -> tuple[Float[Tensor, "b H n n"], Float[Tensor, "b H n n"] | None]:
        """Return attention's probabilities within the first n positions of the first `batch` sequences, and the slopes
        of capped scores (None if scores are not capped).
        """
        if self._kept is None:
            return self._attend(batch, n)
        probs, slopes = (values if values is None else values[:batch, :, :n, :n] for values in self._kept)
        return probs, slopes

    def factor(self, matrix: Matrix, n: int) -> Float[Tensor, "B n r"]:
        """Return the lower triangular factor of the module's inputs at the first n positions, with ones for a bias."""
        key = self.block.inputs[matrix.name]
        if key not in self._factors:
            self._factors[key] = prefix_factor(self.inputs(matrix), bias=key[1])
        made = self._factors[key]
        return made[:, :n, : min(n, made.shape[2])]

    def inputs(self, part: Matrix | Norm) -> Float[Tensor, "B n *width"]:
        """Return the module's input."""
        return self._seen.inputs[part.name].to(self.dtype)

    def outputs(self, part: Matrix | Norm) -> Float[Tensor, "B n *width"]:
        """Return what the module returned."""
        return self._seen.outputs[part.name].to(self.dtype)

    def _attend(self, batch: int, n: int) -> tuple[Tensor, Tensor | None]:
        groups, keys = self.keys.shape[2], self.keys[:batch, :n].permute(0, 2, 3, 1)
        queries = self.queries[:batch, :n].unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4)
        scores, slopes = self.block.scaling * (queries @ keys[:, :, None]).flatten(1, 2), None
        if (cap := self.block.cap) is not None:
            parts = (scores / cap).tanh_()
            scores, slopes = cap * parts, 1 - parts.square()
        mask = Band() if self._seen.mask is None else self._seen.mask
        if isinstance(mask, Band):
            mask = ~mask.hides(slice(0, n), slice(0, n), scores.device)[None, None]
        mask = mask[:batch, :, :n, :n]
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        return scores.softmax(-1), slopes

    def _rotated_heads(self, matrix: Matrix, norm: Norm | None) -> tuple[tuple[Tensor, Tensor] | None, Tensor]:
        """Return the norm's normalised input and inverse rms over each head, if it has one, and the rotated heads [B,
        n, heads, c].
        """
        if norm is None:
            normalized, heads = None, self._heads(self.outputs(matrix))
        else:
            normalized, heads = norm.normalize(self.inputs(norm)), self._heads(self.outputs(norm))
        first, second = heads.chunk(2, -1)
        turned = torch.cat([-second, first], -1)
        return normalized, heads * self.cos[:, :, 0] + turned * self.sin[:, :, 0]

    def _heads(self, values: Tensor) -> Tensor:
        return values.reshape(*values.shape[:2], -1, self.block.head_dim)
