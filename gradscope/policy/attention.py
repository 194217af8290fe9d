"""The choice of torch's attention kernels for changing lengths, and whether prompts may be packed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

packing_allowed: ContextVar[bool] = ContextVar("packing_allowed", default=True)
"""Whether `objective.can_pack` may be True."""


@contextmanager
def without_cudnn_attention() -> Iterator[None]:
    """Disable cuDNN's kernels for `scaled_dot_product_attention` inside the block.

    In half precision torch prefers them on recent GPUs, and plans for each new shape, which decoding has at every
    token. This is suspected, but not measured, to make decoding slow there.
    """
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


@contextmanager
def without_packing() -> Iterator[None]:
    """Compute every response with its prompt and padding inside the block."""
    token = packing_allowed.set(False)
    try:
        yield
    finally:
        packing_allowed.reset(token)
