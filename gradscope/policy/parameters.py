"""The measured parameters of a model, and their layout in a flat vector."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from gradscope.errors import InputError
from gradscope.policy.packed import is_packed, named_weights, storage_name

PART = 1 << 22
"""Entries of a vector processed at a time, to avoid large temporaries."""
_MARK = "_gradscope_measured"
"""Attribute of a model that lists the measured parameters, if not all are."""
_RESTORED = "_gradscope_restored"
"""Attribute of a model: a state of the version counters at which the weights were those of an earlier one."""


def measure_only(model: nn.Module, names: Iterable[str]) -> None:
    """Restrict measured gradients and optimizer steps to these parameters from now on.

    names: in `model.named_parameters()`. This is a property of the model, like its division into a frozen base and an
    adapter. Raises InputError for unknown names, or without any.
    """
    names, known = frozenset(names), dict(model.named_parameters())
    if unknown := sorted(names - known.keys()):
        raise InputError(f"{type(model).__name__} has no parameter {unknown[0]!r}; see dict(model.named_parameters())")
    if not any(known[name].is_floating_point() for name in names):
        raise InputError("there is no parameter to measure; name at least one that can have a gradient")
    setattr(model, _MARK, names)


def is_subset(model: nn.Module) -> bool:
    """Return whether only some of the model's parameters are measured."""
    return hasattr(model, _MARK)


@contextmanager
def trained_only(model: nn.Module) -> Iterator[None]:
    """Restrict what is measured to the parameters that require a gradient, inside the block."""
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    if is_subset(model) or len(names) == len(list(model.parameters())):
        yield
        return
    measure_only(model, names)
    try:
        yield
    finally:
        delattr(model, _MARK)


def float_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return every measured parameter that can have a gradient, tied ones once. Raises InputError for packed ones."""
    chosen = getattr(model, _MARK, None)
    for name, tensor in named_weights(model):
        if (chosen is None or name in chosen) and is_packed(tensor):
            raise InputError(
                f"{name} is packed in few bits ({storage_name(tensor)}), where a weight has no gradient; load the "
                "checkpoint with gradscope.load_policy, which dequantizes it"
            )
    return [(n, p) for n, p in model.named_parameters() if p.is_floating_point() and (chosen is None or n in chosen)]


@torch.no_grad()
def merged_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter by its name in the plain model, detached, with LoRA merged in; tied ones once."""
    layers = {name: module for name, module in model.named_modules() if hasattr(module, "get_delta_weight")}
    for name, parameter in model.named_parameters():
        owner, _, leaf = name.rpartition(".base_layer.")
        if owner in layers:
            merged = parameter.detach()
            if leaf == "weight":
                with torch.autocast(parameter.device.type, enabled=False):
                    merged = merged + layers[owner].get_delta_weight("default")
            yield f"{owner}.{leaf}", merged
        elif ".lora_" not in name:
            yield name, parameter.detach()


def weights_version(model: nn.Module) -> tuple[object, ...]:
    """Return what differs once a parameter was written to or replaced; writes through `.data` are not seen."""
    counted = tuple((id(p), 0 if p.is_inference() else p._version) for p in model.parameters())
    restored, before = getattr(model, _RESTORED, (None, None))
    return before if counted == restored else counted


def say_restored(model: nn.Module, version: tuple[object, ...]) -> None:
    """Record that the weights are now bit for bit those of an earlier `weights_version`."""
    vars(model).pop(_RESTORED, None)
    setattr(model, _RESTORED, (weights_version(model), version))


def flat_slices(model: nn.Module) -> dict[str, slice]:
    """Return each parameter's slice of a flat vector [P], by name.

    >>> flat_slices(nn.Linear(3, 2))
    {'weight': slice(0, 6, None), 'bias': slice(6, 8, None)}
    """
    named = float_parameters(model)
    ends = accumulate((p.numel() for _, p in named), initial=0)
    return {name: slice(*pair) for (name, _), pair in zip(named, pairwise(ends), strict=True)}


def model_bytes(model: nn.Module) -> int:
    """Return the bytes of all parameters (tied ones once) and buffers."""
    return sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
