"""Backward rules that carry the gradients of K tokens through a decoder's block together; pure functions of tensors.

Notation: delta[b, s, k] is the gradient of the log π of token k of sequence b at position s of a prefix of n positions.
Positions come before tokens, so that anything shared by the tokens (weights, activations, attention probabilities) is
a factor of one large matrix product. H query heads share G heads of keys and values, of width c.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gradscope.gradients.engine.norms import strips
from gradscope.gradients.engine.products import Product, multiply_exactly

Rows = tuple[Float[Tensor, "B H m n"], Float[Tensor, "B H m n"] | None]
"""Attention probabilities [m queries, n keys], and derivatives of capped scores, cap · tanh(score / cap), or None."""


def linear_backward(
    delta: Float[Tensor, "B n K out"],
    weight: Float[Tensor, "out in"],
    *,
    into: Float[Tensor, "B n K in"] | None = None,
    multiply: Product = multiply_exactly,
) -> Float[Tensor, "B n K in"]:
    """Carry δ through y = W x + b: ∂/∂x = Wᵀ δ for all positions and tokens, added in place to `into`."""
    into = None if into is None else into.flatten(0, 2)
    return multiply(delta.flatten(0, 2), weight, into).view(*delta.shape[:3], -1)


def rms_norm_backward(
    delta: Float[Tensor, "B n K *heads d"],
    normalized: Float[Tensor, "B n #K *heads d"],
    scale: Float[Tensor, " d"],
    inverse_rms: Float[Tensor, "B n #K *heads 1"],
    *,
    residual: Float[Tensor, "B n K *heads d"] | None = None,
) -> tuple[Float[Tensor, "B n K *heads d"], Float[Tensor, "B K d"]]:
    """Carry δ through y = scale ∘ x̂, x̂ = x · inverse_rms; return ∂/∂x and the gradient of the scale.

    ∂/∂x = inverse_rms · (scale ∘ δ − x̂ · mean(x̂ ∘ scale ∘ δ)); ∂/∂scale = Σ_s δ_s ∘ x̂_s.
    residual: the gradient of x through other paths, added to ∂/∂x.
    """
    product = delta * normalized
    mean = (product @ (scale / scale.numel())).unsqueeze(-1)
    slope = scale * inverse_rms
    back = delta * slope if residual is None else torch.addcmul(residual, delta, slope)
    back.addcmul_(mean.mul_(-inverse_rms), normalized)
    return back, product.transpose(1, 2).flatten(2, -2).sum(2)


def rotary_backward(
    delta: Float[Tensor, "B n K heads c"], cos: Float[Tensor, "B n #K 1 c"], sin: Float[Tensor, "B n #K 1 c"]
) -> Float[Tensor, "B n K heads c"]:
    """Carry δ through y = x ∘ cos + R x ∘ sin (RoFormer), with R (a, b) = (−b, a) on the halves, so Rᵀ = −R."""
    back = delta * cos
    (first, second), (sin_1, sin_2) = delta.chunk(2, -1), sin.chunk(2, -1)
    half_1, half_2 = back.chunk(2, -1)
    half_1.addcmul_(second, sin_2)
    half_2.addcmul_(first, sin_1, value=-1)
    return back


def attention_backward(
    delta: Float[Tensor, "B n K H c"],
    probs: Callable[[int, int], Rows],
    attended: Float[Tensor, "B n H c"],
    queries: Float[Tensor, "B n H c"],
    keys: Float[Tensor, "B n G c"],
    values: Float[Tensor, "B n G c"],
    *,
    scaling: float,
    multiply: Product = multiply_exactly,
) -> tuple[Float[Tensor, "B n K H c"], Float[Tensor, "B n K G c"], Float[Tensor, "B n K G c"]]:
    """Carry δ through o = P v, P = softmax(scaling · q kᵀ) with causal zeros; return ∂/∂q, ∂/∂k and ∂/∂v.

    ∂/∂v = Pᵀ δ,  S = scaling · P ∘ (δ vᵀ − δ·o),  ∂/∂q = S k,  ∂/∂k = Sᵀ q. Queries are processed in strips, with keys
    up to the strip's end; later keys have probability 0.
    probs: (start, end) → P of these queries over the last keys before `end`, and slopes, which multiply S.
    """
    batch, n, tokens, heads, width = delta.shape
    groups = batch * keys.shape[2]
    share = batch * heads // groups
    back_q, back_k, back_v = torch.empty_like(delta), None, None
    k, v = (t.transpose(1, 2).reshape(groups, n, width) for t in (keys, values))
    for start, end in reversed([*strips(n, delta.device, queries=True)]):
        count = end - start
        rows = count * share
        d = delta[:, start:end].permute(0, 3, 1, 2, 4).contiguous()  # [B, H, positions, K, c]
        p, slopes = probs(start, end)
        seen = slice(end - p.shape[3], end)
        o, q = (t[:, start:end].transpose(1, 2) for t in (attended, queries))
        # S = scaling · P ∘ (δ vᵀ − δ·o)
        inner = (d * o[:, :, :, None]).sum(-1, keepdim=True)
        s = multiply(d.view(groups, rows * tokens, width), v[:, seen].mT).view(batch, heads, count, tokens, -1)
        factor = scaling * p if slopes is None else scaling * p * slopes
        s = s.sub_(inner).mul_(factor[:, :, :, None])
        # ∂/∂q = S k
        back = multiply(s.view(groups, rows * tokens, -1), k[:, seen]).view(batch, heads, count, tokens, width)
        back_q[:, start:end] = back.permute(0, 2, 3, 1, 4)
        # ∂/∂k = Sᵀ q
        back = multiply(s.view(groups, rows, -1).mT, q.reshape(groups, rows, width))
        back_k = _add_part(back_k, back.view(batch, -1, tokens, p.shape[3], width).permute(0, 3, 2, 1, 4), seen)
        # ∂/∂v = Pᵀ δ
        back = multiply(p.reshape(groups, rows, -1).mT, d.view(groups, rows, tokens * width))
        back_v = _add_part(back_v, back.view(batch, -1, p.shape[3], tokens, width).permute(0, 2, 3, 1, 4), seen)
        del p, slopes, factor, s, back  # before the next strip
    return back_q, back_k, back_v


def _add_part(total: Float[Tensor, "B n K G c"] | None, part: Float[Tensor, "B m K G c"], seen: slice) -> Tensor:
    """Add the part to these positions of the total, in place; None: start it, from the last positions."""
    if total is None:
        return part.contiguous() if seen.start == 0 else torch.nn.functional.pad(part, (0,) * 6 + (seen.start, 0))
    total[:, seen] += part
    return total


def attention_backward_at(
    delta: Float[Tensor, "B K H c"],
    positions: Int[Tensor, "B K"],
    probs: Rows,
    attended: Float[Tensor, "B n H c"],
    queries: Float[Tensor, "B n H c"],
    keys: Float[Tensor, "B n G c"],
    values: Float[Tensor, "B n G c"],
    *,
    scaling: float,
) -> tuple[Float[Tensor, "B K H c"], Float[Tensor, "B n K G c"], Float[Tensor, "B n K G c"]]:
    """Carry δ at one position per token; return ∂/∂q there, and ∂/∂k and ∂/∂v over the prefix.

    In the last block nothing else is nonzero, so its queries, output projection and MLP cost one position per token.
    probs: P at these positions over all n keys, and slopes.
    """
    groups, sequence = keys.shape[2], torch.arange(len(delta), device=delta.device)[:, None]
    at = sequence, positions
    d, o, q = (t.unflatten(2, (groups, -1)).transpose(1, 2) for t in (delta, attended[at], queries[at]))
    p, slope = (
        t if t is None else t.unflatten(1, (groups, -1)).transpose(2, 3)  # [B, G, K, share, n]
        for t in probs
    )
    k, v = keys.transpose(1, 2), values.transpose(1, 2)
    inner = (d * o).sum(-1, keepdim=True)
    s = scaling * p * ((d.flatten(2, 3) @ v.mT).view(p.shape) - inner)
    s = s if slope is None else s * slope
    back_q = (s.flatten(2, 3) @ k).view(d.shape).transpose(1, 2).flatten(2, 3)
    return back_q, (s.mT @ q).permute(0, 3, 2, 1, 4), (p.mT @ d).permute(0, 3, 2, 1, 4)
