"""Which tensors of a model hold weights packed in few bits, so that their entries are not the weights'."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_BITS = (torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32)
"""Dtypes of matrices that hold packed weights; ids and positions are int64."""
_BITSANDBYTES = ("Params4bit", "Int8Params")
"""bitsandbytes' classes of parameters, which may store their bits in a floating dtype."""


def named_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield what may hold weights: the parameters, and the buffers that are matrices (masks have more dimensions)."""
    yield from model.named_parameters()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if buffer.dim() == 2)


def is_packed(tensor: Tensor) -> bool:
    """Return whether a tensor holds a weight in packed form: its entries are not the weight's."""
    if type(tensor).__name__ in _BITSANDBYTES or tensor.dtype in _BITS:
        return True
    if tensor.is_floating_point() and tensor.dtype.itemsize < 2:  # 8 bits and fewer
        return True
    # A DTensor is a shard (`whole_weights`).
    return is_traceable_wrapper_subclass(tensor) and not hasattr(tensor, "full_tensor")


def storage_name(tensor: Tensor) -> str:
    """Return the class of a packed tensor, or the dtype of its bits."""
    kind = type(tensor).__name__
    return str(tensor.dtype).removeprefix("torch.") if kind in ("Parameter", "Tensor") else kind
