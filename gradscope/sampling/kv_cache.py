"""A key-value cache that grows in place, and attention that reads it without copies.

For small models, transformers' decoding spends more time copying the cache than computing: DynamicLayer copies all of
it to append a column, dropping finished rows copies the others, and sdpa with a mask copies each shared key and value
head once per query head. Avoiding this changes no result.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

SPARE = 64
"""Spare columns added whenever a buffer grows."""
SHARED_HEADS, UNASKED = "gradscope_shared_heads", "gradscope_unasked"
"""Names under which `_attend` and transformers' sdpa, each with `_mask`, are registered."""


class GrowingTensor:
    """A tensor that grows along its third dimension and drops rows, mostly without copying."""

    def __init__(self) -> None:
        self._room = torch.empty(0)
        self._rows = self._length = 0

    @property
    def value(self) -> Float[Tensor, "B H S D"]:
        return self._room[: self._rows, :, : self._length]

    def append(self, columns: Float[Tensor, "B H s D"]) -> None:
        rows, heads, width, size = columns.shape
        start, self._length = self._length, self._length + width
        if start == 0 or self._length > self._room.shape[2]:
            room = columns.new_empty(rows, heads, self._length + SPARE, size)
            if start:
                room[:, :, :start] = self._room[:rows, :, :start]
            self._room, self._rows = room, rows
        self._room[:rows, :, start : self._length] = columns

    def take_rows(self, rows: Int[Tensor, " R"], moved: Int[Tensor, " M"] | None = None) -> None:
        """Move row rows[k] to row k.

        moved: the k that change place, if there are no more rows than before; only these are copied.
        """
        if moved is None:
            self._room = self.value[rows]
        elif len(moved):
            self._room[moved, :, : self._length] = self._room[rows[moved], :, : self._length]
        self._rows = len(rows)


class GrowingLayer(DynamicLayer):
    """The keys and values of one block."""

    def __init__(self) -> None:
        super().__init__()
        self._growing = (GrowingTensor(), GrowingTensor())

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **_: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        for growing, states in zip(self._growing, (key_states, value_states), strict=True):
            growing.append(states)
        return self._show()

    def reorder_cache(self, beam_idx: Tensor, moved: Tensor | None = None) -> None:
        for growing in self._growing:
            growing.take_rows(beam_idx, moved)
        self._show()

    def _show(self) -> tuple[Tensor, Tensor]:
        """Expose the cache where transformers looks for it."""
        self.keys, self.values = (growing.value for growing in self._growing)
        return self.keys, self.values


def growing_cache(config: Any) -> DynamicCache:
    """Return transformers' cache for this configuration, with full-attention layers that grow in place."""
    cache = DynamicCache(config=config)
    cache.layers = [GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def take_rows(cache: DynamicCache, rows: list[int], device: torch.device) -> Int[Tensor, " R"]:
    """Move row rows[k] of the cache to row k, with no more rows than before; return `rows` on the device."""
    places = [k for k, row in enumerate(rows) if row != k]
    index, moved = (torch.tensor(of, dtype=torch.long).to(device, non_blocking=True) for of in (rows, places))
    for layer in cache.layers:
        if isinstance(layer, GrowingLayer):
            layer.reorder_cache(index, moved)
        else:
            layer.reorder_cache(index)  # supported by all layers, unlike batch_select_indices
    return index


@contextmanager
def decoding_attention(model: Any) -> Iterator[None]:
    """Inside the block, build sdpa's mask without synchronising with the device.

    On the CPU, also read shared key and value heads without copies. (On a GPU, sdpa with a mask and shared heads would
    fall back to its slowest kernel.)
    """
    config = model.config.get_text_config()
    if config._attn_implementation != "sdpa" or not getattr(model, "_supports_attention_backend", False):
        yield
        return
    config._attn_implementation = SHARED_HEADS if model.device.type == "cpu" else UNASKED
    try:
        yield
    finally:
        config._attn_implementation = "sdpa"


def _mask(*args: Any, **settings: Any) -> Tensor | None:
    """Return transformers' mask for sdpa; None if it masks nothing."""
    skip = settings.get("allow_is_causal_skip", True) and settings.get("attention_mask") is None
    return sdpa_mask(*args, **settings | {"allow_is_causal_skip": skip})


def _attend(
    module: Any,
    query: Float[Tensor, "B Q s D"],
    key: Float[Tensor, "B H S D"],
    value: Float[Tensor, "B H S V"],
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute transformers' sdpa without copying shared heads, under a plain mask."""
    plain = attention_mask is not None and not any(others.get(name) is not None for name in ("position_bias", "cache"))
    if not plain or key.shape[1] == query.shape[1]:
        settings = others | {"dropout": dropout, "scaling": scaling}
        return sdpa_attention_forward(module, query, key, value, attention_mask, **settings)
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(SHARED_HEADS, _attend)
AttentionInterface.register(UNASKED, sdpa_attention_forward)
AttentionMaskInterface.register(SHARED_HEADS, _mask)
AttentionMaskInterface.register(UNASKED, _mask)
