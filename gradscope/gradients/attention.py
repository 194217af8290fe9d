"""Causal attention in strips of queries that are recomputed in the backward pass, with memory linear in length.

Plain attention stores its probabilities, [heads, n, n] per block: 2.4 GB at 8,192 tokens with 9 heads in float32. Here
each strip of queries attends to all of its keys, and its probabilities are freed before the next strip; the backward
pass recomputes them from queries and keys, like FlashAttention. Each strip holds whole rows of scores, and uses plain
torch operations only, so it supports batched gradients (vmap) and forward-mode tangents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from gradscope.policy import layer_settings, without_packing

STRIPS = "gradscope_strips"
"""The name under which `_attend` and `_find_band` are registered with transformers."""
PLAIN = 1 << 28
"""Attention stays plain up to this many bytes of probabilities in all blocks; the graph holds a few times as much. With
9 heads of width 64 on one core, forward and backward, strips took 1.25 times as long as plain attention at 256 tokens,
.9 at 512 and .36 at 1,024."""
SCORES = {"cpu": 1 << 20, "cuda": 1 << 26}
"""Scores in a strip. cpu: at 2,048 and 4,096 tokens, 4 times fewer or more take equally long; cuda: assumed."""
SHORTEST = 16
"""Fewest queries of a strip."""
TOLERANCE = 1e-4
"""Largest accepted difference between strips and plain attention in the trial, relative to the largest logit; float32
rounding is about 1e-6."""
HARMLESS = {"sliding_window", "position_ids", "cache_position"}
"""Arguments that plain attention ignores, since the mask and the rotated queries already reflect them."""


@dataclass(frozen=True)
class Band:
    """A banded causal mask: each query sees its own key and those before it, at most `window` in all."""

    window: int | None = None

    def hides(self, queries: slice, keys: slice, device: torch.device | None = None) -> Bool[Tensor, "q k"]:
        """Return which of these keys each query does not see."""
        query, key = (torch.arange(part.start, part.stop, device=device) for part in (queries, keys))
        distance = query[:, None] - key
        return distance < 0 if self.window is None else (distance < 0) | (distance >= self.window)

    def strips(self, length: int, rows: int, device: torch.device) -> Iterator[tuple[slice, slice]]:
        """Yield the positions of each strip's queries and of all keys that they see. rows: score rows per query."""
        seen = length if self.window is None else min(length, self.window)
        size = max(SHORTEST, SCORES.get(device.type, SCORES["cuda"]) // (rows * seen))
        for start in range(0, length, size):
            stop = min(start + size, length)
            yield slice(start, stop), slice(0 if self.window is None else max(0, start - self.window + 1), stop)


def attend(
    query: Float[Tensor, "B H n D"],
    key: Float[Tensor, "B G n D"],
    value: Float[Tensor, "B G n V"],
    band: Band,
    *,
    scaling: float,
    softcap: float | None = None,
) -> Float[Tensor, "B n H V"]:
    """Compute softmax(scaling · q kᵀ) v over the keys in the band; supports backward, vmap and forward mode.

    Each group of H / G consecutive heads shares keys and values. softcap: c in c · tanh(scores / c).
    """
    return _Attention.apply(query, key, value, band, scaling, softcap)


class _Attention(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs: Any) -> Float[Tensor, "B n H V"]:
        heads = inputs[0].shape[1]
        return torch.cat([_apart(s.weigh(s.probs, s.values), heads) for s in _strips(*inputs)], 1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.settings = inputs[3:]
        ctx.save_for_backward(*inputs[:3])
        ctx.save_for_forward(*inputs[:3])

    @staticmethod
    def backward(ctx: Any, gradient: Float[Tensor, "B n H V"]) -> tuple[Tensor | None, ...]:
        states, (_, scaling, _) = ctx.saved_tensors, ctx.settings
        heads, groups = (tensor.shape[1] for tensor in states[:2])
        # Allocated from `gradient`, which has an extra axis under vmap.
        back, keys_back, values_back = (gradient.new_zeros(tensor.shape) for tensor in states)
        for s in _strips(*states, *ctx.settings):
            arrived = _together(_part(gradient, 1, s.at).transpose(1, 2), groups)
            scores = _widen(arrived @ s.values.mT)
            scores = s.through_softmax(scores).mul_(scaling)
            scores = (scores if s.slopes is None else scores.mul_(s.slopes)).to(gradient.dtype)
            _part(back, 2, s.at).copy_(_apart(scores @ s.keys, heads).transpose(1, 2))
            _part(keys_back, 2, s.seen).add_(scores.mT @ s.queries)
            _part(values_back, 2, s.seen).add_(s.weigh(s.probs.mT, arrived))
        return back, keys_back, values_back, None, None, None

    @staticmethod
    def jvp(ctx: Any, query: Tensor, key: Tensor, value: Tensor, *_: None) -> Float[Tensor, "B n H V"]:
        states, (_, scaling, _) = ctx.saved_tensors, ctx.settings
        (heads, groups), out = (tensor.shape[1] for tensor in states[:2]), []
        for s in _strips(*states, *ctx.settings):
            scores = _together(query[:, :, s.at], groups) @ s.keys.mT + s.queries @ key[:, :, s.seen].mT
            scores = _widen(scores).mul_(scaling)
            scores = s.through_softmax(scores if s.slopes is None else scores.mul_(s.slopes))
            moved = s.weigh(scores, s.values) + s.weigh(s.probs, value[:, :, s.seen])
            out.append(_apart(moved, heads))
        return torch.cat(out, 1)


@dataclass(frozen=True)
class _Strip:
    """A strip of queries, grouped by the heads that share keys, and all keys that they see."""

    at: slice
    """Positions of the queries."""
    seen: slice
    """Positions of the keys."""
    queries: Float[Tensor, "B G q D"]
    keys: Float[Tensor, "B G k D"]
    values: Float[Tensor, "B G k V"]
    probs: Float[Tensor, "B G q k"]
    """Attention probabilities, in float32 or wider."""
    slopes: Float[Tensor, "B G q k"] | None
    """Derivatives of capped scores; None without a cap."""

    def weigh(self, weights: Float[Tensor, "B G r c"], rows: Float[Tensor, "B G c V"]) -> Float[Tensor, "B G r V"]:
        """Compute weighted sums of rows in the rows' precision, as plain attention does."""
        return weights.to(rows.dtype) @ rows

    def through_softmax(self, change: Float[Tensor, "B G q k"]) -> Float[Tensor, "B G q k"]:
        """Multiply by the softmax's (symmetric) Jacobian, in place."""
        return change.sub_((change * self.probs).sum(-1, keepdim=True)).mul_(self.probs)


def _strips(
    query: Tensor, key: Tensor, value: Tensor, band: Band, scaling: float, softcap: float | None
) -> Iterator[_Strip]:
    (batch, heads, length, _), groups = query.shape, key.shape[1]
    for at, seen in band.strips(length, batch * heads, query.device):
        queries, keys = _together(query[:, :, at], groups), key[:, :, seen]
        scores, slopes = _widen((queries @ keys.mT).mul_(scaling)), None
        if softcap is not None:
            scores = (scores / softcap).tanh_()
            slopes = 1 - scores.square()
            scores = scores.mul_(softcap)
        # A view of all heads of a group. Without a window, only keys within the strip's own positions are hidden.
        first = seen.start if band.window is not None else at.start
        some = scores.view(batch, heads, -1, scores.shape[-1])[..., first - seen.start :]
        some.masked_fill_(band.hides(at, slice(first, seen.stop), query.device), -torch.inf)
        yield _Strip(at, seen, queries, keys, value[:, :, seen], scores.softmax(-1), slopes)


def _widen(scores: Tensor) -> Tensor:
    return scores.to(torch.promote_types(scores.dtype, torch.float32))


def _part(values: Tensor, axis: int, where: slice) -> Tensor:
    """Return a view of a slice, by an operation that batched gradients support; indexing is not always one."""
    return values.narrow(axis, where.start, where.stop - where.start)


def _together(states: Float[Tensor, "B H q D"], groups: int) -> Float[Tensor, "B G r D"]:
    """Group the queries of heads that share keys."""
    return states.reshape(len(states), groups, -1, states.shape[-1])


def _apart(states: Float[Tensor, "B G r V"], heads: int) -> Float[Tensor, "B q H V"]:
    return states.reshape(len(states), heads, -1, states.shape[-1]).transpose(1, 2)


@contextmanager
def strips_where_long(model: nn.Module, length: int) -> Iterator[None]:
    """Run attention in strips for long sequences; the model's attention must be plain, and stays so for others.

    length: longest sequence that will come; if it is short, `can_strip` is not tried.
    """
    if probability_bytes(model, 1, length) <= PLAIN or not can_strip(model):
        yield
        return

    def choose(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = next(v for v in (*args, kwargs.get("input_ids"), kwargs.get("inputs_embeds")) if v is not None)
        long = probability_bytes(model, *ids.shape[:2]) > PLAIN
        model.config._attn_implementation = STRIPS if long else "eager"

    # The body is also called without the head.
    modules = {id(module): module for module in (model, getattr(model, "base_model", model))}.values()
    hooks = [module.register_forward_pre_hook(choose, with_kwargs=True) for module in modules]
    try:
        with without_packing():
            yield
    finally:
        for hook in hooks:
            hook.remove()
        model.config._attn_implementation = "eager"


def probability_bytes(model: nn.Module, batch: int, length: int) -> int:
    """Return the bytes of plain attention's probabilities in all blocks, for sequences of this length."""
    heads = sum(count or 1 for count in layer_settings(model, "num_attention_heads"))
    return 4 * batch * heads * length**2


_tried: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def can_strip(model: nn.Module) -> bool:
    """Return whether this model, with plain attention, computes the same in strips; tried once on a few tokens.

    Requires attention and masks that transformers dispatches by name, causal or sliding-window, without extras such as
    sinks, biases or dropout.
    """
    if model not in _tried:
        _tried[model] = getattr(model, "_supports_attention_backend", False) and _try(model)
    return _tried[model]


@torch.no_grad()
def _try(model: nn.Module) -> bool:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(STRIPS, _attend)
    AttentionMaskInterface.register(STRIPS, _find_band)
    ids = torch.arange(8, device=next(model.parameters()).device)[None] % model.config.get_text_config().vocab_size
    plain = model(input_ids=ids, use_cache=False).logits
    try:
        model.config._attn_implementation = STRIPS
        strips = model(input_ids=ids, use_cache=False).logits
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError):  # another kind of attention
        return False
    finally:
        model.config._attn_implementation = "eager"
    tolerance = TOLERANCE if plain.dtype in (torch.float32, torch.float64) else 0.1
    return bool(((strips - plain).abs().max() <= tolerance * plain.abs().max()).item())


def _attend(
    module: Any,
    query: Float[Tensor, "B H n D"],
    key: Float[Tensor, "B G n D"],
    value: Float[Tensor, "B G n V"],
    attention_mask: Band,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Float[Tensor, "B n H V"], None]:
    """Attend in strips, with the signature of transformers' attention functions."""
    unknown = [n for n, value in others.items() if not (value is None or isinstance(value, bool) or n in HARMLESS)]
    if dropout or unknown or not isinstance(attention_mask, Band):
        raise NotImplementedError(f"{type(module).__name__} wants {unknown or 'another kind of attention'}")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    return attend(query, key, value, attention_mask, scaling=scaling, softcap=softcap), None


def _find_band(
    *,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Tensor],
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    device: torch.device | None = None,
    **others: Any,
) -> Band:
    """Return the band described by transformers' mask function. Raises NotImplementedError for other masks."""
    band, span = Band(local_size), 4 * max(q_length, local_size or 0)
    queries = torch.linspace(0, span, 65, device=device).long()[:, None]
    near = [0, 1, 2, span // 2, *((local_size - 1, local_size, local_size + 1) if local_size else ())]
    distance = torch.tensor(sorted({*near, *(-d for d in near)}), device=device)
    keys = (queries - distance).clamp(min=0)
    expected = (keys <= queries) & (queries - keys < (local_size or span + 1))
    padded = attention_mask is not None and not attention_mask.all()
    special = padded or q_length != kv_length or any(others.get(n) for n in ("q_offset", "kv_offset", "use_vmap"))
    if special or not torch.equal(mask_function(0, 0, queries, keys).expand_as(expected), expected):
        raise NotImplementedError("this mask is no band")
    return band
