"""A model as it is measured: frozen, without dropout, with plain attention; everything is restored afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from gradscope.gradients.attention import strips_where_long
from gradscope.policy import unpacked, without_autocast


@contextmanager
def measuring(model: nn.Module, length: int = 0) -> Iterator[None]:
    """Freeze the parameters, disable dropout and autocast, switch to plain attention; restore everything afterwards.
    Packed weights are dequantized on use.

    Only plain ("eager") attention and experts can carry many tokens' gradients back at once, and apply every soft cap.
    Long sequences are attended to in strips, which do both, if the model allows it.

    length: tokens of the longest sequence that will be run.
    """
    flags = [(p, p.requires_grad) for p in model.parameters()]
    modes = [(m, m.training) for m in model.modules()]
    attention = getattr(model.config, "_attn_implementation", None)
    experts = getattr(model.config, "_experts_implementation", None)
    try:
        for parameter, _ in flags:
            parameter.requires_grad_(False)
        for module, _ in modes:
            module.training = False
        if attention not in (None, "eager"):
            model.set_attn_implementation("eager")
        if experts not in (None, "eager"):
            model.set_experts_implementation("eager")
        with without_autocast(model), unpacked(model), strips_where_long(model, length):
            yield
    finally:
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
        for module, mode in modes:
            module.training = mode
        if attention not in (None, "eager"):
            model.set_attn_implementation(attention)
        if experts not in (None, "eager"):
            model.set_experts_implementation(experts)
