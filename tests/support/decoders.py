"""Attention of other kinds than the plain one, for decoders that are tiny."""

from __future__ import annotations

import torch
from torch import Tensor

COMMON = ("qwen2", "qwen3", "llama")
SANDWICHED = ("gemma2", "gemma3")
"""With norms behind attention and MLP; gemma2 with capped scores."""


LATE = 18


def attend_eagerly(module, query, key, value, attention_mask, scaling, change, **_):
    share = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(share, 1) for t in (key, value))
    scores = change(query @ key.mT * scaling)
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    probs = scores.masked_fill(later, -torch.inf).softmax(-1)
    return (probs @ value).transpose(1, 2).contiguous(), probs


def windowed(scores: Tensor) -> Tensor:
    far = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(-LATE)
    return scores.masked_fill(far, -torch.inf)
