"""Norms of the gradients of known modules' parameters, from what flows in and what flows back, tensors to tensors.

Notation: K tokens of each of B sequences are measured at once over prefixes of n positions. delta is the gradient of
each token's log π with respect to the module's output at every position of the prefix, and zero after the token's own:
[B, n, K, …], as one operation serves all tokens at a position; [K, n, …] of the one sequence of a diagonal module.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gradscope.gradients.engine.products import Product, multiply_exactly

Squares = dict[str, Float[Tensor, "B K"]]
"""Squared norms of token gradients, by module."""

NARROWEST, WIDEST = 28, 128
"""Positions taken at once where a product has zeros to skip: fewer cost more in operations than they save."""


def strip_width(n: int, narrowest: int = NARROWEST) -> int:
    """Return the width of a strip: a quarter of n positions, within NARROWEST and WIDEST."""
    return min(-(-n // min(4, max(1, n // narrowest))), WIDEST)


def strips(n: int, narrowest: int = NARROWEST) -> Iterator[tuple[int, int]]:
    """Return (start, end) of each strip of n positions.

    >>> list(strips(72))
    [(0, 36), (36, 72)]
    """
    width = max(1, strip_width(n, narrowest))
    return ((start, min(start + width, n)) for start in range(0, n, width))


def prefix_factor(inputs: Float[Tensor, "*B n d"], *, bias: bool) -> Float[Tensor, "*B n r"]:
    """Return L with L Lᵀ = A Aᵀ for inputs A (with a column of ones for a bias): enough to know ‖Σ_s δ_s a_sᵀ‖.

    With Aᵀ = Q R, L = Rᵀ is lower trapezoidal, so L[:m, :min(m, r)] is the factor of the first m positions too. A
    Gram matrix would serve as well but loses half of the digits.
    """
    a = inputs.to(torch.promote_types(inputs.dtype, torch.float32))
    if bias:
        a = torch.cat([a, torch.ones_like(a[..., :1])], dim=-1)
    return torch.linalg.qr(a.mT, mode="r").R.mT.contiguous()


def linear_square_norms(
    delta: Float[Tensor, "B n K out"], factor: Float[Tensor, "B n r"], *, multiply: Product = multiply_exactly
) -> Float[Tensor, "B K"]:
    """Return the squared norm of Σ_s δ_s [a_s, 1]ᵀ: the gradient of a linear module's weight and bias together.

    factor: of the module's inputs, by `prefix_factor`; lower triangular, it is taken in strips of columns, each without
    its zeros.
    """
    (batch, _, tokens, width), rows = delta.shape, delta.flatten(2)
    if not factor.shape[2]:  # a module that was called on no row, such as an expert without tokens
        return delta.new_zeros(batch, tokens)
    parts = [multiply(factor[:, start:, start:end].mT, rows[:, start:]) for start, end in strips(factor.shape[2])]
    norms = torch.cat([torch.linalg.vector_norm(part.view(batch, -1, width), dim=2) for part in parts], 1)
    return torch.linalg.vector_norm(norms.view(batch, -1, tokens), dim=1).square()


def square_norms(values: Float[Tensor, "B n K *rest"]) -> Float[Tensor, "B K"]:
    """Return the squared norm of each token's part."""
    by_row = torch.linalg.vector_norm(values.flatten(3), dim=3)  # in two steps: along memory first
    return torch.linalg.vector_norm(by_row, dim=1).square()


def outer_square_norms(
    delta: Float[Tensor, "*m out"], inputs: Float[Tensor, "*m in"], *, bias: bool
) -> Float[Tensor, "*m"]:
    """Return the same for tokens that have one position each: ‖δ‖² (‖a‖² + 1 for the bias)."""
    return delta.square().sum(-1) * (inputs.square().sum(-1) + bias)


def diagonal_square_norms(
    delta: Float[Tensor, "K *rows d"], slope: Float[Tensor, "*broadcast d"], scale: Float[Tensor, " d"] | None = None
) -> Float[Tensor, " K"]:
    """Return the squared norm of Σ_s δ_s ∘ slope_s: a vector parameter that scales or shifts channel by channel.

    slope is ∂output/∂parameter, which for such a module is diagonal: the normalised input for a norm's weight, ones
    for a bias. [*rows, d] if the tokens share it, [K, *rows, d] if each has its own. scale: multiplies the gradient.
    """
    gradient = (delta * slope).reshape(len(delta), -1, delta.shape[-1]).sum(1)
    return (gradient if scale is None else gradient * scale.to(gradient)).square().sum(1)


def embedding_square_norms(
    delta: Float[Tensor, "B n K d"], ids: Int[Tensor, "B n"], scale: Float[Tensor, "vocab d"] | None = None
) -> Float[Tensor, "B K"]:
    """Return the squared norm of an embedding table's gradient; gradients of repeated ids are summed first.

    scale: multiplies the gradient.
    """
    batch, tokens = len(ids), delta.shape[2]
    entries = ids * batch + torch.arange(batch, device=ids.device)[:, None]
    # Not unique(): its number of rows would be read back from a GPU. As many rows as ids; spare ones are zero.
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
