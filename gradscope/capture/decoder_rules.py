"""Backward rules that carry the gradients of K tokens through a decoder's block at once, tensors to tensors.

Notation: delta[s, k] is the gradient of token k's log π at position s of a prefix of n positions. Positions come first,
so that whatever the tokens share (weights, activations, attention's probabilities) is one factor of one large matrix
product, and a shorter prefix is a slice. H query heads share G heads of keys and values, c numbers in each.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gradscope.capture.products import Product, multiply_exactly
from gradscope.capture.rules import strips

NARROWEST_QUERIES = 56
"""Of a strip in `attention_backward`, whose loop has many operations."""


def linear_backward(
    delta: Float[Tensor, "n K out"],
    weight: Float[Tensor, "out in"],
    *,
    into: Float[Tensor, "n K in"] | None = None,
    multiply: Product = multiply_exactly,
) -> Float[Tensor, "n K in"]:
    """Through y = W x + b: ∂/∂x = Wᵀ δ, one product for all positions and tokens.

    into: what flows back to x on other ways; the product is added to it, in its place.
    """
    into = None if into is None else into.flatten(0, 1)
    return multiply(delta.flatten(0, 1), weight, into).unflatten(0, delta.shape[:2])


def rms_norm_backward(
    delta: Float[Tensor, "n K *heads d"],
    normalized: Float[Tensor, "n #K *heads d"],
    scale: Float[Tensor, " d"],
    inverse_rms: Float[Tensor, "n #K *heads 1"],
    *,
    residual: Float[Tensor, "n K *heads d"] | None = None,
) -> tuple[Float[Tensor, "n K *heads d"], Float[Tensor, "K d"]]:
    """Through y = scale ∘ x̂, x̂ = x · inverse_rms: (∂/∂x, gradient of the scale).

    ∂/∂x = inverse_rms · (scale ∘ δ − x̂ · mean(x̂ ∘ scale ∘ δ)); ∂/∂scale = Σ_s δ_s ∘ x̂_s.
    residual: what flows back to x on other ways; it is added to ∂/∂x.
    """
    product = delta * normalized
    mean = (product @ (scale / scale.numel())).unsqueeze(-1)
    slope = scale * inverse_rms
    back = delta * slope if residual is None else torch.addcmul(residual, delta, slope)
    back.addcmul_(mean.mul_(-inverse_rms), normalized)
    return back, product.transpose(0, 1).flatten(1, -2).sum(1)


def rotary_backward(
    delta: Float[Tensor, "n K heads c"], cos: Float[Tensor, "n #K 1 c"], sin: Float[Tensor, "n #K 1 c"]
) -> Float[Tensor, "n K heads c"]:
    """Through y = x ∘ cos + R x ∘ sin, R (a, b) = (−b, a) the quarter turn of the halves, so Rᵀ = −R (RoFormer)."""
    back = delta * cos
    (first, second), (sin_1, sin_2) = delta.chunk(2, -1), sin.chunk(2, -1)
    half_1, half_2 = back.chunk(2, -1)
    half_1.addcmul_(second, sin_2)
    half_2.addcmul_(first, sin_1, value=-1)
    return back


def attention_backward(
    delta: Float[Tensor, "n K H c"],
    probs: Float[Tensor, "H n n"],
    attended: Float[Tensor, "n H c"],
    queries: Float[Tensor, "n H c"],
    keys: Float[Tensor, "n G c"],
    values: Float[Tensor, "n G c"],
    *,
    scaling: float,
    multiply: Product = multiply_exactly,
) -> tuple[Float[Tensor, "n K H c"], Float[Tensor, "n K G c"], Float[Tensor, "n K G c"]]:
    """Through o = P v, P = softmax(scaling · q kᵀ) with causal zeros: (∂/∂q, ∂/∂k, ∂/∂v).

    ∂/∂v = Pᵀ δ,  S = scaling · P ∘ (δ vᵀ − δ·o),  ∂/∂q = S k,  ∂/∂k = Sᵀ q. Queries go in strips, each with the keys up
    to its own end: what is later has no probability. The last comes first, as its keys are all.
    """
    n, tokens, heads, width = delta.shape
    groups, share = keys.shape[1], heads // keys.shape[1]
    back_q, back_k, back_v = torch.empty_like(delta), None, None
    k, v, q = (t.transpose(0, 1) for t in (keys, values, queries))
    for start, end in reversed([*strips(n, NARROWEST_QUERIES)]):
        rows = (end - start) * share
        d = delta[start:end].permute(2, 0, 1, 3).contiguous()
        p = probs[:, start:end, :end]
        o = attended[start:end].transpose(0, 1)
        flow = (d * o[:, :, None]).sum(-1, keepdim=True)
        s = multiply(d.view(groups, rows * tokens, width), v[:, :end].mT).view(heads, end - start, tokens, end)
        s = s.sub_(flow).mul_((scaling * p)[:, :, None])
        back = multiply(s.view(groups, rows * tokens, end), k[:, :end]).view(heads, end - start, tokens, width)
        back_q[start:end] = back.permute(1, 2, 0, 3)
        back = multiply(s.view(groups, rows, tokens * end).mT, q[:, start:end].reshape(groups, rows, width))
        back_k = _add_prefix(back_k, back.view(groups, tokens, end, width).permute(2, 1, 0, 3))
        back = multiply(p.reshape(groups, rows, end).mT, d.view(groups, rows, tokens * width))
        back_v = _add_prefix(back_v, back.view(groups, end, tokens, width).permute(1, 2, 0, 3))
    return back_q, back_k, back_v


def _add_prefix(total: Float[Tensor, "n K G c"] | None, part: Float[Tensor, "m K G c"]) -> Float[Tensor, "n K G c"]:
    """Add to the first m positions, in place; None: the part has all of them, and is what others are added to."""
    if total is None:
        return part.contiguous()
    total[: len(part)] += part
    return total


def attention_backward_at(
    delta: Float[Tensor, "K H c"],
    positions: Int[Tensor, " K"],
    probs: Float[Tensor, "H n n"],
    attended: Float[Tensor, "n H c"],
    queries: Float[Tensor, "n H c"],
    keys: Float[Tensor, "n G c"],
    values: Float[Tensor, "n G c"],
    *,
    scaling: float,
) -> tuple[Float[Tensor, "K H c"], Float[Tensor, "n K G c"], Float[Tensor, "n K G c"]]:
    """The same where each token's δ lies at one position: ∂/∂q there, ∂/∂k and ∂/∂v over the prefix.

    In the last block that is all there is, so its queries, output projection and MLP cost one position a token.
    """
    groups = keys.shape[1]
    d, o, q = (t.unflatten(1, (groups, -1)).transpose(0, 1) for t in (delta, attended[positions], queries[positions]))
    p = probs[:, positions].unflatten(0, (groups, -1)).transpose(1, 2)  # [G, K, share, n]
    k, v = keys.transpose(0, 1), values.transpose(0, 1)
    flow = (d * o).sum(-1, keepdim=True)
    s = scaling * p * ((d.flatten(1, 2) @ v.mT).view(p.shape) - flow)
    back_q = (s.flatten(1, 2) @ k).view(d.shape).transpose(0, 1).flatten(1, 2)
    return back_q, (s.mT @ q).permute(2, 1, 0, 3), (p.mT @ d).permute(2, 1, 0, 3)
