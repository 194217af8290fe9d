"""Where a GPU's queue would be waited for, counted on the CPU.

A model's weights, and all that is made from them or on their device, are taken to lie on a device of their own, which
says that it is `cpu:0`. What the host reads of it waits, and what gradscope copies from it by `.cpu()` and `.to()`;
copies to it, and into a tensor of the host, are not counted.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import gradscope

PACKAGE = str(Path(gradscope.__file__).parent)
HOST, DEVICE = torch.device("cpu"), torch.device("cpu", 0)
READ = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_consecutive", "is_nonzero"}
"""Operations that give the host a number, or a tensor whose shape depends on numbers."""
INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_"}
FETCHES = {Tensor.tolist, Tensor.numpy}
"""What copies to the host and is no operation of the CPU."""


class _Operations(TorchDispatchMode):
    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name, there = func._schema.name.partition("::")[2], any(map(_is_there, tree_leaves((args, kwargs))))
        if there and name in READ:
            self.counts[name] += 1
        elif there and name in INDEXED:
            self.counts["mask"] += sum(index is not None and index.dtype == torch.bool for index in args[1])
        found = func(*args, **(kwargs or {}))
        if there:
            _place(found, DEVICE)
        return found


class _Functions(TorchFunctionMode):
    """Says where a tensor lies, and moves it."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self.counts = counts

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func == Tensor.device.__get__:  # another object each time
            return DEVICE if _is_there(args[0]) else HOST
        if func == Tensor.is_cpu.__get__:
            return not _is_there(args[0])
        if func in FETCHES and _is_there(args[0]):
            self.counts[func.__name__] += 1
        found = func(*args, **(kwargs or {}))
        # Libraries' own moves are left out: they are asked for in C++, which knows no cpu:0.
        ours = sys._getframe(1).f_code.co_filename.startswith(PACKAGE)
        if func is Tensor.cpu or (func is Tensor.to and ours):
            goal = HOST if func is Tensor.cpu else _goal(*args[1:], *(kwargs or {}).values())
            if goal is not None and _is_there(args[0]) != (goal == DEVICE):
                self.counts["copy"] += goal == HOST
                found = _place(found.view_as(found) if found is args[0] else found, goal)
        elif kwargs and kwargs.get("device") == DEVICE:
            _place(found, DEVICE)
        return found


def _is_there(value: object) -> bool:
    return getattr(value, "is_there", False)


def _place(found: Any, device: torch.device) -> Any:
    for tensor in tree_leaves(found):
        if isinstance(tensor, Tensor):
            tensor.is_there = device == DEVICE
    return found


def _goal(*given: Any) -> torch.device | None:
    """Where `.to(*given)` moves a tensor."""
    for value in given:
        if isinstance(value, Tensor):
            return DEVICE if _is_there(value) else HOST
        if isinstance(value, torch.device | str):
            return torch.device(value)
    return None


@contextmanager
def counting_waits(model: nn.Module) -> Iterator[Counter[str]]:
    """Waits by kind. What asks for the model's device must be made inside, where it is `cpu:0`."""
    counts: Counter[str] = Counter()
    own = _place([*chain(model.parameters(), model.buffers())], DEVICE)
    try:
        with _Operations(counts), _Functions(counts):
            yield counts
    finally:
        _place(own, HOST)
