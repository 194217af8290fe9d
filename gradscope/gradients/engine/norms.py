"""Gradient norms of known modules' parameters, from their inputs and output gradients; pure functions of tensors.

Notation: K tokens of each of B sequences are measured together over prefixes of n positions. delta is the gradient of
each token's log π with respect to the module's output at every position of the prefix, zero after the token's own:
[B, n, K, …], since one operation serves all tokens at a position; [K, n, …] for diagonal modules, with one sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gradscope.gradients.engine.products import Product, multiply_exactly

Squares = dict[str, Float[Tensor, "B K"]]
"""Squared norms of token gradients, by module."""


@dataclass(frozen=True)
class Widths:
    """Widths of strips of positions in products that skip zeros; narrower ones cost more than they save."""

    narrowest: int
    narrowest_queries: int
    """For attention, whose loop has many operations."""
    widest: int


WIDTHS = {"cpu": Widths(28, 56, 128), "cuda": Widths(128, 256, 512)}
"""Widths by device. cuda: assumed, see analyses/gpu/QUEUE.md."""
QR_SLOWNESS = 2
"""Time per FLOP of QR relative to a matrix product: 1.5 to 2.5 on one core at widths of 512 to
2,048; assumed for a GPU."""


def widths_of(device: torch.device | str) -> Widths:
    """Return the widths of strips on a device or type of device."""
    kind = device if isinstance(device, str) else device.type
    return WIDTHS.get(kind, WIDTHS["cuda"])


def strips(n: int, device: torch.device, *, queries: bool = False) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of each strip of n positions; a quarter of them, within the device's limits.

    >>> list(strips(72, torch.device("cpu")))
    [(0, 36), (36, 72)]
    """
    widths = widths_of(device)
    narrowest = widths.narrowest_queries if queries else widths.narrowest
    width = max(1, min(-(-n // min(4, max(1, n // narrowest))), widths.widest))
    return ((start, min(start + width, n)) for start in range(0, n, width))


def factor_pays(n: int, inside: int, outputs: int, tokens: int) -> bool:
    """Return whether `prefix_factor` of n inputs of this width pays off for this many tokens.

    A product with the factor skips its zeros: n · c − c²/2 for c = min(n, inside) columns, instead of n · inside. QR
    takes 2 m c² − ⅔ c³ FLOPs, with m = max(n, inside).
    """
    columns, most = min(n, inside), max(n, inside)
    saved = tokens * outputs * (2 * n * inside - columns * (2 * n - columns + 1))
    return saved > QR_SLOWNESS * (2 * most * columns**2 - 2 * columns**3 / 3)


def prefix_factor(inputs: Float[Tensor, "*B n d"], *, bias: bool) -> Float[Tensor, "*B n r"]:
    """Return L with L Lᵀ = A Aᵀ for inputs A (with a column of ones for a bias), which determines ‖Σ_s δ_s a_sᵀ‖.

    With Aᵀ = Q R, L = Rᵀ is lower trapezoidal, so L[:m, :min(m, r)] is the factor of the first m positions too. A
    Gram matrix would do as well but loses half of the digits.
    """
    a = with_ones(inputs.to(torch.promote_types(inputs.dtype, torch.float32)), bias=bias)
    return torch.linalg.qr(a.mT, mode="r").R.mT.contiguous()


def with_ones(inputs: Float[Tensor, "*B n d"], *, bias: bool) -> Float[Tensor, "*B n e"]:
    """Return the inputs, with a column of ones if there is a bias."""
    return torch.cat([inputs, torch.ones_like(inputs[..., :1])], dim=-1) if bias else inputs


def linear_square_norms(
    delta: Float[Tensor, "B n K out"],
    factor: Float[Tensor, "B n r"],
    *,
    triangular: bool = True,
    multiply: Product = multiply_exactly,
) -> Float[Tensor, "B K"]:
    """Return the squared norm of Σ_s δ_s [a_s, 1]ᵀ: the gradient of a linear module's weight and bias together.

    factor: `prefix_factor` of the module's inputs, lower triangular and processed in strips of columns without their
    zeros; or, not triangular, the inputs themselves with a column of ones for a bias.
    """
    (batch, _, tokens, width), rows = delta.shape, delta.flatten(2)
    if not factor.shape[2]:  # a module called on no rows, such as an expert without tokens
        return delta.new_zeros(batch, tokens)
    norms = []
    for start, end in strips(factor.shape[2], factor.device):
        first = start if triangular else 0
        part = multiply(factor[:, first:, start:end].mT, rows[:, first:])
        norms.append(torch.linalg.vector_norm(part.view(batch, -1, width), dim=2))
    norms = torch.cat(norms, 1)
    return torch.linalg.vector_norm(norms.view(batch, -1, tokens), dim=1).square()


def square_norms(values: Float[Tensor, "B n K *rest"]) -> Float[Tensor, "B K"]:
    """Return each token's squared norm."""
    by_row = torch.linalg.vector_norm(values.flatten(3), dim=3)  # in two steps, along contiguous memory first
    return torch.linalg.vector_norm(by_row, dim=1).square()


def outer_square_norms(
    delta: Float[Tensor, "*m out"], inputs: Float[Tensor, "*m in"], *, bias: bool
) -> Float[Tensor, "*m"]:
    """Return the same for tokens with one position each: ‖δ‖² (‖a‖² + 1 for the bias)."""
    return delta.square().sum(-1) * (inputs.square().sum(-1) + bias)


def diagonal_square_norms(
    delta: Float[Tensor, "K *rows d"], slope: Float[Tensor, "*broadcast d"], scale: Float[Tensor, " d"] | None = None
) -> Float[Tensor, " K"]:
    """Return the squared norm of Σ_s δ_s ∘ slope_s, for a vector parameter that scales or shifts channel by channel.

    slope is the diagonal of ∂output/∂parameter: the normalised input for a norm's weight, ones
    for a bias; [*rows, d] if shared by the tokens, else [K, *rows, d]. scale: multiplies the gradient.
    """
    gradient = (delta * slope).reshape(len(delta), -1, delta.shape[-1]).sum(1)
    return (gradient if scale is None else gradient * scale.to(gradient)).square().sum(1)


def embedding_square_norms(
    delta: Float[Tensor, "B n K d"], ids: Int[Tensor, "B n"], scale: Float[Tensor, "vocab d"] | None = None
) -> Float[Tensor, "B K"]:
    """Return the squared norm of an embedding table's gradient (times `scale`), summed over repeated ids first."""
    batch, tokens = len(ids), delta.shape[2]
    entries = ids * batch + torch.arange(batch, device=ids.device)[:, None]
    # Not unique(), whose size needs a synchronisation on a GPU: as many rows as ids, spare ones zero.
    ascending, order = entries.flatten().sort()
    run = (ascending.diff(prepend=ascending[:1]) != 0).cumsum(0)
    row = torch.empty_like(run).index_copy(0, order, run)
    distinct = ascending[-1:].expand_as(run).index_copy(0, run, ascending)
    sums = delta.new_zeros(len(row), *delta.shape[2:]).index_add_(0, row, delta.flatten(0, 1))
    if scale is not None:
        sums *= scale[distinct // batch][:, None].to(sums)
    squares = torch.linalg.vector_norm(sums, dim=2).square()
    return delta.new_zeros(batch, tokens).index_add_(0, distinct % batch, squares)


def tied_cross_terms(
    delta: Float[Tensor, "B n K d"],
    ids: Int[Tensor, "B n"],
    head_delta: Float[Tensor, "B K vocab"],
    head_input: Float[Tensor, "B K d"],
    scale: Float[Tensor, "vocab d"] | None = None,
) -> Float[Tensor, "B K"]:
    """Return 2 ⟨head's gradient, embedding's gradient⟩ of one shared table: 2 Σ_s head_delta[id_s] · ⟨head_input, δ_s⟩.

    scale: multiplies both.
    """
    of_ids = head_delta.gather(2, ids[:, None].expand(-1, head_delta.shape[1], -1))
    if scale is not None:
        delta = delta * scale[ids][:, :, None].to(delta).square()
    return 2 * (of_ids * torch.einsum("bnkd,bkd->bkn", delta, head_input)).sum(2)
