"""Keys and values that decoding appends to in place and attention reads where they lie: most of its time was copying.

At a small size, transformers' decoding spends more time on moving the cache than on the network: DynamicLayer copies
all of it to append a column, dropping finished rows copies the others, and sdpa under a mask copies each shared head
of keys and values once for every head of queries. None of that changes a number.
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
"""Columns to spare whenever a buffer grows."""
SHARED_HEADS = "gradscope_shared_heads"
"""The name under which transformers knows `_attend`."""


class GrowingTensor:
    """A tensor that grows along its third dimension and loses rows, mostly without being copied."""

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

    def take_rows(self, rows: Int[Tensor, " R"]) -> None:
        """Row k becomes what row rows[k] was. Fewer rows than before: only those that change place are copied."""
        if len(rows) > self._rows:
            self._room = self.value[rows]
        else:
            moved = (rows != torch.arange(len(rows), device=rows.device)).nonzero()[:, 0]
            self._room[moved, :, : self._length] = self._room[rows[moved], :, : self._length]
        self._rows = len(rows)


class GrowingLayer(DynamicLayer):
    """The keys and values of one block."""

    def __init__(self) -> None:
        super().__init__()
        self._growing = (GrowingTensor(), GrowingTensor())

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        for growing, states in zip(self._growing, (key_states, value_states), strict=True):
            growing.append(states)
        return self._show()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        for growing in self._growing:
            growing.take_rows(beam_idx)
        self._show()

    def _show(self) -> tuple[Tensor, Tensor]:
        """Where transformers looks for them."""
        self.keys, self.values = (growing.value for growing in self._growing)
        return self.keys, self.values


def growing_cache(config: Any) -> DynamicCache:
    """transformers' cache for this configuration; layers of full attention grow in place, others are transformers'."""
    cache = DynamicCache(config=config)
    cache.layers = [GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


@contextmanager
def shared_heads(model: Any) -> Iterator[None]:
    """While inside, sdpa on the CPU reads keys and values that several heads of queries share without copying them.

    On a GPU, sdpa with a mask and shared heads would fall back to its slowest kernel, so nothing changes there.
    """
    config = model.config.get_text_config()
    dispatches = getattr(model, "_supports_attention_backend", False)
    if model.device.type != "cpu" or config._attn_implementation != "sdpa" or not dispatches:
        yield
        return
    config._attn_implementation = SHARED_HEADS
    try:
        yield
    finally:
        config._attn_implementation = "sdpa"


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
    """transformers' sdpa; its one case that copies shared heads, a plain mask, is done here."""
    plain = attention_mask is not None and not any(others.get(name) is not None for name in ("position_bias", "cache"))
    if not plain or key.shape[1] == query.shape[1]:
        settings = others | {"dropout": dropout, "scaling": scaling}
        return sdpa_attention_forward(module, query, key, value, attention_mask, **settings)
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(SHARED_HEADS, _attend)
AttentionMaskInterface.register(SHARED_HEADS, sdpa_mask)
