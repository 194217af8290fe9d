"""Where a GPU's queue would be waited for, counted on the CPU: operations whose result the host reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

READ = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_consecutive", "is_nonzero"}
"""Operations that give the host a number, or a tensor whose shape depends on numbers."""
INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_"}
FETCHES = {torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.numpy}


class _Operations(TorchDispatchMode):
    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if name in READ:
            self.counts[name] += 1
        elif name in INDEXED:
            self.counts["mask"] += sum(index is not None and index.dtype == torch.bool for index in args[1])
        return func(*args, **(kwargs or {}))


class _Methods(TorchFunctionMode):
    """What copies to the host and is no operation of the CPU."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self.counts = counts

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in FETCHES:
            self.counts[func.__name__] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counting_waits() -> Iterator[Counter[str]]:
    """Waits by kind, of the host's own tensors too: on a CPU they cannot be told from a device's."""
    counts: Counter[str] = Counter()
    with _Operations(counts), _Methods(counts):
        yield counts
