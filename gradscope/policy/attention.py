"""Which of torch's attention kernels are used where sequences of ever new lengths follow each other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def without_cudnn_attention() -> Iterator[None]:
    """Of `scaled_dot_product_attention`'s kernels those of cuDNN are left out; all comes back as it was.

    On GPUs from Hopper on torch takes them first in half precision, and they are planned anew for every shape, which
    takes tenths of a second; decoding has a new shape at every token.
    """
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
