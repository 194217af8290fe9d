"""Matrix products of the backward pass: exact, or fast in a lower precision."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

Product = Callable[..., Tensor]
"""multiply(left, right, into=None): (…, a, b) times (…, b, c) in the dtype of `left`, added to `into` in place."""
Precision = Literal["exact", "bfloat16", "tf32"]


def multiply_exactly(left: Tensor, right: Tensor, into: Tensor | None = None) -> Tensor:
    """Multiply in the precision of the left factor."""
    right = right.to(left.dtype)
    if into is not None:
        return into.addmm_(left, right) if left.ndim == 2 else into.baddbmm_(left, right)
    product = torch.mm if left.ndim == 2 else torch.bmm  # as @, with less overhead
    return product(left, right)


def multiply_in_bfloat16(left: Tensor, right: Tensor, into: Tensor | None = None) -> Tensor:
    """Multiply with both factors rounded to bfloat16 and float32 accumulation."""
    product = (left.bfloat16() @ right.bfloat16()).to(left.dtype)
    return product if into is None else into.add_(product)


def multiply_in_tf32(left: Tensor, right: Tensor, into: Tensor | None = None) -> Tensor:
    """Multiply on a GPU's tensor cores, which round both factors to 11 bits."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        return multiply_exactly(left, right, into)
    finally:
        torch.set_float32_matmul_precision(before)


def measure_speedup(precision: Precision, weight: Tensor, *, rows: int = 256) -> float:
    """Measure a product's speedup in that precision over an exact one with this matrix: best of three, wall time."""
    left = weight.new_ones(rows, len(weight), dtype=torch.promote_types(weight.dtype, torch.float32))
    seconds = {}
    for way in ("exact", precision):
        tries = []
        for _ in range(4):  # the first is a warm-up
            _wait(left.device)
            start = time.perf_counter()
            PRODUCTS[way](left, weight.detach())
            _wait(left.device)
            tries.append(time.perf_counter() - start)
        seconds[way] = min(tries[1:])
    return seconds["exact"] / seconds[precision]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


PRODUCTS: dict[Precision, Product] = {
    "exact": multiply_exactly,
    "bfloat16": multiply_in_bfloat16,
    "tf32": multiply_in_tf32,
}
