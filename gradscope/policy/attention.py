"""The choice of torch's attention kernels for changing lengths."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


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
