"""Forward passes over a micro-batch in which each prompt is computed once and there is no padding.

The responses of a group share their prompt, and everything in a decoder-only model except attention acts on each token
separately. So the tokens go through the network in a single row, prompts first, then responses:

    p p p | q q | a a | b b b | c        three responses, a and b to the first prompt, c to the second

and only attention lays out its queries, keys and values with a row per response

    p p p a a ·
    p p p b b b
    q q c · · ·

to compute ordinary causal attention; from its output, each prompt is taken once. Autograd does the rest.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from gradscope.policy import arithmetic_dtype, layer_settings, packing_allowed
from gradscope.rollouts import Response, TokenBatch, collate

SHARED_PROMPTS = "gradscope_shared_prompts"
"""The name under which `_attend` is registered with transformers."""
WORTH = 0.95
"""Largest ratio of packed to padded tokens at which packing pays off, given the copies in attention."""
TOLERANCE = 1e-4
"""Largest difference of the trial's packed and padded logits, relative to the largest; float32 rounding is 1e-6."""


@dataclass(frozen=True)
class Packing:
    """The layout of a micro-batch [b, n] in one row of N tokens, part after part."""

    lengths: list[int]
    """Lengths of the parts: each distinct prompt, then each row's response."""
    prompts: list[int]
    """Index of the part that is each row's prompt."""
    ids: Int[Tensor, " N"]
    columns: Int[Tensor, " N"]
    """Each token's column in the micro-batch, which is its position."""

    @property
    def width(self) -> int:
        """Length of the longest row."""
        return max(sum(pair) for pair in self._pairs())

    def places(self, rows: Int[Tensor, " K"], columns: Int[Tensor, " K"]) -> Int[Tensor, " K"]:
        """Return the indices in the row of N of the tokens at these cells."""
        first = torch.tensor([0, *accumulate(self.lengths)])
        prompt = torch.tensor(self.prompts)[rows]
        response, length = len(self.lengths) - len(self.prompts) + rows, torch.tensor(self.lengths)[prompt]
        return torch.where(columns < length, first[prompt] + columns, first[response] + columns - length)

    def lay_out(self, values: Float[Tensor, "N *rest"]) -> Float[Tensor, "b w *rest"]:
        """Lay out packed values as [b, n, …], padded with 0."""
        parts, width, cells = values.split(self.lengths), self.width, []
        responses = parts[len(parts) - len(self.prompts) :]
        for prompt, response in zip(self.prompts, responses, strict=True):
            padding = width - len(parts[prompt]) - len(response)
            cells += [parts[prompt], response, values.new_zeros(padding, *values.shape[1:])]
        return torch.cat(cells).unflatten(0, (len(self.prompts), width))

    def take(self, values: Float[Tensor, "b w *rest"]) -> Float[Tensor, "N *rest"]:
        """Pack values from [b, n, …]; for a prompt shared by several rows, the first row's."""
        width = values.shape[1]
        sizes = [size for p, r in self._pairs() for size in (p, r, width - p - r)]
        cells = values.flatten(0, 1).split(sizes)
        # In reverse, so that the first row wins.
        prompts = {part: cells[3 * row] for row, part in reversed(list(enumerate(self.prompts)))}
        return torch.cat([prompts[part] for part in range(len(prompts))] + list(cells[1::3]))

    def _pairs(self) -> list[tuple[int, int]]:
        """Yield the lengths of each row's prompt and response."""
        responses = self.lengths[len(self.lengths) - len(self.prompts) :]
        return [(self.lengths[part], n) for part, n in zip(self.prompts, responses, strict=True)]


def pack(piece: TokenBatch) -> Packing:
    """Pack a micro-batch that starts at column 0, up to the token before each row's last kept one."""
    ids, starts = piece.input_ids.tolist(), piece.response_start.tolist()
    last = (torch.arange(piece.input_ids.shape[1]) * piece.response_mask).amax(1).tolist()
    known: dict[tuple[int, ...], int] = {}
    prompts, responses = [], []
    for row, start, end in zip(ids, starts, last, strict=True):
        start = min(max(start, 0), end)
        prompts.append(known.setdefault(tuple(row[:start]), len(known)))
        responses.append((start, row[start:end]))
    parts = [(0, list(prompt)) for prompt in known] + responses
    columns = torch.cat([torch.arange(start, start + len(part)) for start, part in parts])
    return Packing([len(p) for _, p in parts], prompts, torch.tensor([i for _, p in parts for i in p]), columns)


def packing_for(model: nn.Module, piece: TokenBatch) -> Packing | None:
    """Return a packing of the micro-batch for this model; None to compute it padded.

    None if packing does not pay off, as for a single row, if an attention window is narrower than the micro-batch, or
    if `can_pack` is False.
    """
    rows, width = piece.input_ids.shape
    if rows == 1 or not can_pack(model) or not piece.response_mask.any():
        return None
    windows = chain(*(layer_settings(model, name) for name in ("sliding_window", "attention_chunk_size")))
    if any(window is not None and window < width for window in windows):
        return None
    packing = pack(piece)
    return packing if len(packing.ids) <= WORTH * rows * width else None


_tried: WeakKeyDictionary[nn.Module, dict[str, bool]] = WeakKeyDictionary()
"""By the name of the attention."""


def can_pack(model: nn.Module) -> bool:
    """Return whether this model computes the same in one row, judging by its structure and one trial on a small batch.

    Requires sdpa or plain ("eager") attention dispatched by transformers, with explicit positions. Excludes wrapped or
    sharded models and several processes; gradient checkpointing, whose recomputation would not see the packing; and
    precisions below float32, where a difference cannot be told from rounding.
    """
    if not packing_allowed.get() or not _may_pack(model):
        return False
    tried, attention = _tried.setdefault(model, {}), model.config.get_text_config()._attn_implementation
    if attention not in tried:
        tried[attention] = _try(model)
    return tried[attention]


def _may_pack(model: nn.Module) -> bool:
    if not hasattr(model, "config") or hasattr(model, "unshard"):
        return False
    named = getattr(model, "_supports_attention_backend", False)
    attention = getattr(model.config.get_text_config(), "_attn_implementation", None)
    wide = torch.finfo(arithmetic_dtype(model)).bits >= 32
    checkpointing = any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    return named and wide and attention in ("sdpa", "eager") and not checkpointing


@torch.no_grad()
def _try(model: nn.Module) -> bool:
    vocab = model.config.get_text_config().vocab_size
    draw = random.Random(0)  # torch's would be refused inside vmap
    ids = [[draw.randrange(vocab) for _ in range(n)] for n in (3, 2, 4, 2, 3)]
    rows = [Response(ids[0], ids[2]), Response(ids[0], ids[3]), Response(ids[1], ids[4])]
    piece, device = collate(rows), next(model.parameters()).device
    packing, (row, column) = pack(piece), piece.response_mask.nonzero().unbind(1)
    with torch.autocast(device.type, enabled=False):
        padded = model(input_ids=piece.input_ids.to(device), use_cache=False).logits.cpu()[row, column - 1]
        try:
            with attending(model, packing):
                packed = model(**packed_inputs(packing, device), use_cache=False).logits.cpu()[
                    0, packing.places(row, column - 1)
                ]
        except torch.OutOfMemoryError:
            raise
        except (AttributeError, RuntimeError, TypeError, ValueError, LookupError):  # no position ids, or no single row
            return False
    return bool(((packed - padded).abs().max() <= TOLERANCE * padded.abs().max()).item())


def packed_inputs(packing: Packing, device: torch.device) -> dict[str, Any]:
    """Return the model's inputs, for use inside `attending`."""
    ids = packing.ids[None].to(device, non_blocking=True)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "position_ids": packing.columns[None].to(device, non_blocking=True),
    }


_packing: ContextVar[tuple[Packing, str]] = ContextVar("packing")
"""The packing, and the name of the model's own attention."""


@contextmanager
def attending(model: nn.Module, packing: Packing) -> Iterator[None]:
    """Let the model's attention take this packing's tokens in one row."""
    from transformers import AttentionInterface

    AttentionInterface.register(SHARED_PROMPTS, _attend)  # no mask is registered, so transformers makes none
    config = model.config.get_text_config()
    usual, config._attn_implementation = config._attn_implementation, SHARED_PROMPTS
    token = _packing.set((packing, usual))
    try:
        yield
    finally:
        config._attn_implementation = usual
        _packing.reset(token)


def _attend(
    module: Any,
    query: Float[Tensor, "1 Q N D"],
    key: Float[Tensor, "1 H N D"],
    value: Float[Tensor, "1 H N V"],
    attention_mask: Tensor | None,
    **settings: Any,
) -> tuple[Float[Tensor, "1 N Q V"], None]:
    """Apply the model's own attention with a row per response."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    packing, usual = _packing.get()
    attend, mask = sdpa_attention_forward, None
    if usual == "eager":  # each family's own, beside its attention
        attend = sys.modules[type(module).__module__].eager_attention_forward
        mask = query.new_full((packing.width, packing.width), torch.finfo(query.dtype).min).triu(1)[None, None]
    rows = (packing.lay_out(states[0].transpose(0, 1)).transpose(1, 2) for states in (query, key, value))
    out, _ = attend(module, *rows, mask, **settings)
    return packing.take(out)[None], None
