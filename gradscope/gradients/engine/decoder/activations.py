"""Activations of a common decoder's blocks, recorded in one forward pass for the backward rules."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from gradscope.gradients.engine.decoder.parts import DecoderBlock, Matrix, Norm
from gradscope.gradients.engine.decoder.probabilities import Probabilities
from gradscope.gradients.engine.norms import factor_pays, prefix_factor, with_ones
from gradscope.gradients.engine.recording import BlockCall, block_input
from gradscope.gradients.hooks import first_tensor, forward_hooks


@dataclass
class Seen:
    """One block's forward pass over B sequences of n positions."""

    hidden: Tensor | None = None
    """The block's input [B, n, d]."""
    call: BlockCall | None = None
    """The block's arguments; None before it is called."""
    inputs: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    """Outputs by module."""
    rotary: tuple[Tensor, ...] = ()
    """(cos, sin), [1 or B, n, c] each."""
    mask: Any = None
    """Attention's mask [1 or B, 1 or H, n, n], added to the scores or True at visible keys; None: causal; a Band with
    attention in strips. Anything else is not supported."""
    accounted: Bool[Tensor, ""] | None = None
    """The result of `check`, if it ran before the tensors were freed."""

    def put_positions_first(self, head_norms: list[str]) -> None:
        """Transpose inputs and outputs of head norms from [B, heads, n, c] to [B, n, heads, c]."""
        for values in (self.inputs, self.outputs):
            for name in values.keys() & {*head_norms}:
                if values[name].ndim == 4 and values[name].shape[1] != self.hidden.shape[1]:
                    values[name] = values[name].transpose(1, 2)

    def let_go(self) -> None:
        """Free everything not needed to run the block again."""
        self.inputs, self.outputs, self.rotary, self.mask = {}, {}, (), None


@contextmanager
def record_blocks(
    model: nn.Module, blocks: list[DecoderBlock], leave: Callable[[DecoderBlock, Seen, Tensor], None] | None = None
) -> Iterator[list[Seen]]:
    """Record the first forward pass through the blocks; `leave` gets each block, its record and its output."""
    seen = {block.name: Seen() for block in blocks}
    by_block = {block.name: block for block in blocks}
    by_attention = {block.attention: seen[block.name] for block in blocks}
    owner = {part.name: seen[b.name] for b in blocks for part in (*b.matrices, *b.norms)}

    def record(name: str, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        own = seen.get(name) or by_attention.get(name) or owner[name]
        if own.call is not None:  # The head may run several times, and its norms once more for their slopes.
            return
        if name in by_block:
            own.hidden, own.call = block_input(args, kwargs).detach(), BlockCall.of(args, kwargs)
            own.put_positions_first([norm.name for norm in by_block[name].head_norms])
            if leave is not None:
                leave(by_block[name], own, first_tensor(output).detach())
        elif name in by_attention:
            angles = kwargs.get("position_embeddings")
            angles = angles if isinstance(angles, (tuple, list)) else ()
            own.rotary = tuple(a.detach() for a in angles if isinstance(a, Tensor))
            own.mask = kwargs.get("attention_mask")
        elif name not in own.inputs:
            own.inputs[name], own.outputs[name] = args[0].detach(), output.detach()

    with forward_hooks(model, [*owner, *by_block, *by_attention], record):
        yield [*seen.values()]


class BlockActivations:
    """One block's activations over B sequences, with everything that all their prefixes share in a backward pass.

    Tensors are [B, n, …] over the whole sequences, or [B, n, 1, …] to broadcast over tokens; in float32, or float64 for
    a float64 policy. keep_probs: store the attention probabilities instead of recomputing them for every chunk.
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
        """Derivatives of activation(gate) ∘ up by gate and by up (activation(gate)), [B, n, 1, MLP's width]."""
        self._factors: dict[tuple[str, bool], tuple[Tensor, bool]] = {}
        scores = {"scaling": block.scaling, "cap": block.cap}
        self.probs = Probabilities(self.queries, self.keys, seen.mask, **scores, keep=keep_probs)

    def prepare(self, tokens: int, *, last: bool, keep_inputs: bool = False) -> None:
        """Compute what the backward pass needs for this many tokens per sequence, and free the rest.

        last: whether this is the last block, where only keys and values have gradients over the whole prefix.
        keep_inputs: keep the inputs of all matrices, to form their gradients.
        """
        used, outputs = (self.block.key, self.block.value) if last else self.block.matrices, defaultdict(int)
        for matrix in used:
            outputs[self.block.inputs[matrix.name]] += matrix.module.out_features
        for matrix in used:
            if (key := self.block.inputs[matrix.name]) not in self._factors:
                inputs, (n, width) = self.inputs(matrix), self.inputs(matrix).shape[1:]
                triangular = factor_pays(n, width, outputs[key], tokens)
                make = prefix_factor if triangular else with_ones
                self._factors[key] = make(inputs, bias=key[1]), triangular
        kept = [self.block.query.name] if last else []
        kept = [matrix.name for matrix in self.block.matrices] if keep_inputs else kept
        self._seen = Seen(inputs={name: self._seen.inputs[name] for name in kept})
        del self.hidden
        if last:
            del self.mlp_norm, self.gate_slope, self.activated, self.attention_end, self.mlp_end

    def factor(self, matrix: Matrix, n: int) -> tuple[Float[Tensor, "B n r"], bool]:
        """Return a factor (`prefix_factor`, or inputs with ones for a bias) at n positions, and if it is triangular."""
        made, triangular = self._factors[self.block.inputs[matrix.name]]
        return made[:, :n, : min(n, made.shape[2]) if triangular else None], triangular

    def inputs(self, part: Matrix | Norm) -> Float[Tensor, "B n *width"]:
        """Return the module's input."""
        return self._seen.inputs[part.name].to(self.dtype)

    def outputs(self, part: Matrix | Norm) -> Float[Tensor, "B n *width"]:
        """Return the module's output."""
        return self._seen.outputs[part.name].to(self.dtype)

    def _rotated_heads(self, matrix: Matrix, norm: Norm | None) -> tuple[tuple[Tensor, Tensor] | None, Tensor]:
        """Return the head norm's normalised input and inverse rms, if any, and the rotated heads [B, n, heads, c]."""
        if norm is None:
            normalized, heads = None, self._heads(self.outputs(matrix))
        else:
            normalized, heads = norm.normalize(self.inputs(norm)), self._heads(self.outputs(norm))
        first, second = heads.chunk(2, -1)
        turned = torch.cat([-second, first], -1)
        return normalized, heads * self.cos[:, :, 0] + turned * self.sin[:, :, 0]

    def _heads(self, values: Tensor) -> Tensor:
        return values.reshape(*values.shape[:2], -1, self.block.head_dim)
