"""Which of torch's attention kernels may be used while lengths keep changing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def without_cudnn_attention() -> Iterator[None]:
    """Keep `scaled_dot_product_attention` from using cuDNN's kernels inside the block; restore the setting afterwards.

    In half precision torch prefers them on recent GPUs, and plans them for each new shape; decoding has a new one at
    every token. That this is what makes it slow there is suspected, not measured.
    """
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
