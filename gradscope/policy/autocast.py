"""Computing in the precision of the weights, whatever a trainer's autocast asks for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from gradscope.policy.forwards import replaced_forwards


@contextmanager
def without_autocast(model: nn.Module) -> Iterator[None]:
    """Compute in the precision of the weights inside the block; restore everything afterwards.

    Switches off autocast, and takes away that which accelerate wraps around the forward of a model that it prepares
    (transformers' Trainer and TRL with `bf16=True`).
    """
    wrapped = [(m, m._original_forward) for m in model.modules() if {"forward", "_original_forward"} <= vars(m).keys()]
    kinds = {p.device.type for p in model.parameters()} - {"meta"}
    with ExitStack() as stack:
        for kind in kinds:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        stack.enter_context(replaced_forwards(wrapped))
        yield
