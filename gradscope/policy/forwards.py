"""Forwards replaced for a while, and weights that are made for one pass and again for its backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


@contextmanager
def replaced_forwards(pairs: Sequence[tuple[nn.Module, Callable[..., Any]]]) -> Iterator[None]:
    """Give each module another forward inside the block."""
    before = [(module, vars(module).get("forward")) for module, _ in pairs]
    try:
        for module, forward in pairs:
            module.forward = forward
        yield
    finally:
        for module, forward in before:
            if forward is None:
                vars(module).pop("forward", None)
            else:
                module.forward = forward


@contextmanager
def made_again(made: Mapping[int, Callable[[Tensor], Callable[[], Tensor]]]) -> Iterator[None]:
    """Have autograd save, instead of (part of) a weight that was made for this pass, how to make it again.

    made: data pointer of such a weight's storage → what turns a tensor that autograd saves of it into a function that
    makes this tensor again, and holds nothing of it.
    """

    def pack(saved: Tensor) -> Tensor | Callable[[], Tensor]:
        again = made.get(saved.untyped_storage().data_ptr())
        return saved if again is None else again(saved)

    with saved_tensors_hooks(pack, lambda kept: kept if isinstance(kept, Tensor) else kept()):
        yield
