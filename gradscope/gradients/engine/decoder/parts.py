"""The parts of a common decoder's block, recognised by structure and behaviour rather than by architecture name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gradscope.policy import arithmetic_dtype

if TYPE_CHECKING:
    from gradscope.gradients.engine.ownership import Ownership

PLAIN = ("input_layernorm", None, "post_attention_layernorm", None)
SANDWICH = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
"""Names of the norms around attention and around the MLP: in most families, and in Gemma 2 and 3."""


@dataclass(frozen=True)
class Norm:
    """A module that computes scale ∘ x / √(mean(x²) + eps)."""

    name: str
    scale: Float[Tensor, " d"]
    """Factor on the normalised input: the weight, or 1 + weight in some families."""
    eps: float
    weight: nn.Parameter

    def normalize(self, x: Float[Tensor, "B n *heads d"]) -> tuple[Tensor, Tensor]:
        """Return x̂ and 1/√(mean(x²) + eps) with an axis for tokens: [B, n, 1, *heads, d], [B, n, 1, *heads, 1]."""
        inverse_rms = (x.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return (x * inverse_rms).unsqueeze(2), inverse_rms.unsqueeze(2)


@dataclass(frozen=True)
class Matrix:
    """A linear module."""

    name: str
    module: nn.Linear


@dataclass(frozen=True)
class DecoderBlock:
    """x + attention(norm(x)), then y + mlp(norm(y)): rotary attention with grouped keys and a gated MLP.

    The MLP is down(activation(gate(·)) ∘ up(·)). Queries and keys may be normalised before rotation, and the outputs of
    attention and MLP before they are added (Gemma 2 and 3).
    """

    name: str
    attention: str
    """Name of the module called with the rotary angles and the mask."""
    attention_norm: Norm
    query: Matrix
    key: Matrix
    value: Matrix
    query_norm: Norm | None
    key_norm: Norm | None
    output: Matrix
    attention_end: Norm | None
    """Norm of attention's output."""
    mlp_norm: Norm
    gate: Matrix
    up: Matrix
    down: Matrix
    mlp_end: Norm | None
    """Norm of the MLP's output."""
    activation: Callable[[Tensor], Tensor]
    head_dim: int
    scaling: float
    """Factor of the attention scores."""
    cap: float | None
    """Soft cap of the scores, cap · tanh(score / cap); None: uncapped."""

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return self.query.module.out_features // self.head_dim

    @cached_property
    def inputs(self) -> dict[str, tuple[str, bool]]:
        """Map each matrix to (a matrix with the same input, and so the same factor; whether it has a bias)."""
        same = {self.key.name: self.query.name, self.value.name: self.query.name, self.up.name: self.gate.name}
        return {m.name: (same.get(m.name, m.name), m.module.bias is not None) for m in self.matrices}

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return self.query, self.key, self.value, self.output, self.gate, self.up, self.down

    @property
    def norms(self) -> tuple[Norm, ...]:
        ends = self.attention_end, self.mlp_end
        return tuple(n for n in (self.attention_norm, self.mlp_norm, *self.head_norms, *ends) if n is not None)

    @property
    def head_norms(self) -> tuple[Norm, ...]:
        """The norms of queries and keys, if any."""
        return tuple(n for n in (self.query_norm, self.key_norm) if n is not None)


def find_decoder_blocks(model: nn.Module, blocks: nn.ModuleList, ownership: Ownership) -> list[DecoderBlock] | None:
    """Return the parts of every block; None if a block is built differently or has other parameters.

    This does not see how the parts are used: the backward rules still have to be tested against autograd.
    """
    names = {id(module): name for name, module in model.named_modules()}
    found = []
    for block in blocks:
        parts = _find_parts(names[id(block)], block, ownership)
        if parts is None:
            return None
        found.append(parts)
    known = {part.name for parts in found for part in (*parts.matrices, *parts.norms)}
    inside = tuple(names[id(block)] + "." for block in blocks)
    claimed = {name for name in ownership.rules if name.startswith(inside)}
    return found if claimed == known and not any(name.startswith(inside) for name in ownership.general) else None


def _find_parts(name: str, block: nn.Module, ownership: Ownership) -> DecoderBlock | None:
    attention, mlp = getattr(block, "self_attn", None), getattr(block, "mlp", None)
    if attention is None or mlp is None:
        return None

    def matrix(owner: nn.Module, prefix: str, role: str) -> Matrix | None:
        full = f"{name}.{prefix}.{role}"
        return Matrix(full, getattr(owner, role)) if ownership.rules.get(full) == "linear" else None

    q, k, v, o = (matrix(attention, "self_attn", f"{role}_proj") for role in "qkvo")
    gate, up, down = (matrix(mlp, "mlp", f"{role}_proj") for role in ("gate", "up", "down"))
    named = SANDWICH if hasattr(block, SANDWICH[2]) else PLAIN
    norms = [None if role is None else _find_norm(block, name, role) for role in named]
    if any(norm is None and role is not None for norm, role in zip(norms, named, strict=True)):
        return None
    first, attention_end, second, mlp_end = norms
    activation, width = getattr(mlp, "act_fn", None), getattr(attention, "head_dim", None)
    if None in (q, k, v, o, gate, up, down) or not callable(activation) or not isinstance(width, int):
        return None
    if not _fit(q.module, k.module, v.module, o.module, width):
        return None
    if (gate.module.bias is None) != (up.module.bias is None):
        return None
    q_norm, k_norm = (_find_norm(attention, f"{name}.self_attn", role) for role in ("q_norm", "k_norm"))
    scaling = getattr(attention, "scaling", None)
    return DecoderBlock(
        name, f"{name}.self_attn", first, q, k, v, q_norm, k_norm, o, attention_end, second, gate, up, down, mlp_end,
        activation, width, float(width**-0.5 if scaling is None else scaling),
        getattr(attention, "attn_logit_softcapping", None),
    )  # fmt: skip


def _fit(query: nn.Linear, key: nn.Linear, value: nn.Linear, output: nn.Linear, width: int) -> bool:
    """Return whether heads of this width account for the matrices exactly, with equally many queries per group."""
    same = query.out_features == output.in_features and key.out_features == value.out_features
    return same and key.out_features % width == 0 and query.out_features % key.out_features == 0 and width % 2 == 0


def _find_norm(owner: nn.Module, prefix: str, role: str) -> Norm | None:
    """Return the child as an RMS norm if it behaves like one on random inputs."""
    module = getattr(owner, role, None)
    weight = getattr(module, "weight", None)
    eps = next((e for n in ("variance_epsilon", "eps") if isinstance(e := getattr(module, n, None), float)), None)
    if eps is None or not isinstance(weight, Tensor) or weight.ndim != 1 or len(list(module.parameters())) != 1:
        return None
    generator = torch.Generator().manual_seed(0)
    dtype = arithmetic_dtype(module)
    x = torch.randn(1, 2, len(weight), generator=generator).to(weight.device, dtype)
    with torch.no_grad():
        wide = torch.promote_types(dtype, torch.float32)
        normalized = Norm(role, weight, eps, weight).normalize(x.to(wide))[0][0, :, 0]
        # The largest entries give each channel's scale with the least rounding.
        outputs = module(x)[0].to(wide)
        scale = (outputs * normalized).sum(0) / normalized.square().sum(0)
        error = (outputs - scale * normalized).abs().max() / outputs.abs().max().clamp(min=1e-30)
    tolerance = 1e-5 if dtype in (torch.float32, torch.float64) else 0.02
    return Norm(f"{prefix}.{role}", scale, eps, weight) if error <= tolerance else None
