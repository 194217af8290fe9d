"""Computing with the weights that packed bits stand for.

A packed weight (bitsandbytes' 4 and 8 bits, torchao; HQQ's in memory) has no gradient of its own, and kernels for it
may round activations, or rearrange the bits for inference. What is measured is the plain model of the same, dequantized
weights: that is the base on which QLoRA trains its adapter. A policy is dequantized once, when it is loaded; a model in
training keeps its bits, and dequantizes each weight when it is used.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from gradscope.errors import InputError
from gradscope.policy.forwards import made_again, replaced_forwards
from gradscope.policy.packed import is_packed, named_weights, storage_name

_NOT_READ = (
    "which cannot be dequantized here; dequantize the model with the library that made it, save it with "
    "save_pretrained, and give that folder"
)


@torch.no_grad()
def dequantized_state(model: nn.Module, outline: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the weights of a quantized model as those of the plain one, packed ones in this dtype.

    outline: the plain model, whose weights may be on the meta device. Raises InputError for a weight that cannot be
    dequantized.
    """
    found, saved = {}, outline.state_dict().keys()
    names = [name for name, _ in outline.named_parameters()]
    for name in (*names, *(name for name, _ in outline.named_buffers() if name in saved)):
        owner, _, leaf = name.rpartition(".")
        try:
            module = model.get_submodule(owner)
            packed = _packed(module) is not None and leaf == "weight"
            tensor = _unpack(module) if packed else getattr(module, leaf).detach()
        except AttributeError:
            tensor = None
        if tensor is None or is_packed(tensor):
            raise InputError(f"{name} is quantized, {_NOT_READ}")
        found[name] = tensor.to(dtype) if packed else tensor
    return found


@contextmanager
def unpacked(model: nn.Module) -> Iterator[None]:
    """Compute with dequantized weights inside the block, leaving the packed ones as they are.

    Each is dequantized for its layer's forward pass and again for its backward pass, so that at most one exists at a
    time. bitsandbytes' own layers would rearrange the bits of a model in eval mode on some CPUs, after which it cannot
    be trained.
    """
    layers = [module for module in model.modules() if _packed(module) is not None]
    with replaced_forwards([(module, _Plain(weakref.ref(module))) for module in layers]):
        yield


def refuse_unreadable(model: nn.Module) -> None:
    """Raise InputError if some packed weights cannot be dequantized."""
    with torch.no_grad():
        read = {id(_packed(m)) for m in model.modules() if _packed(m) is not None and _unpack(m) is not None}
    for name, tensor in named_weights(model):
        if is_packed(tensor) and id(tensor) not in read:
            raise InputError(f"{name} is packed in few bits ({storage_name(tensor)}), {_NOT_READ}")


def _packed(module: nn.Module) -> Tensor | None:
    """Return the packed weight of a linear layer or embedding that can be unpacked; None for other modules."""
    held = "W_q" if type(module).__name__ == "HQQLinear" else "weight"
    tensor = module._parameters.get(held)
    known = isinstance(module, (nn.Linear, nn.Embedding)) or held == "W_q"
    return tensor if known and tensor is not None and is_packed(tensor) else None


def _unpack(module: nn.Module) -> Tensor | None:
    """Return the weight that a layer's bits stand for; None if this is not known."""
    packed, kind = _packed(module), type(_packed(module)).__name__
    if kind == "Params4bit":
        from bitsandbytes.functional import dequantize_4bit

        state = getattr(packed, "quant_state", None) or module.quant_state
        if state is None or getattr(state, "packing_format_for_cpu", False):  # rearranged, its scales rounded
            return None
        return dequantize_4bit(packed.data, state)
    if kind == "Int8Params":
        from bitsandbytes.functional import int8_vectorwise_dequant

        scales = module.state.SCB if packed.SCB is None else packed.SCB
        return None if scales is None or packed.dtype != torch.int8 else int8_vectorwise_dequant(packed.data, scales)
    if type(module).__name__ == "HQQLinear":
        return module.dequantize()
    if is_traceable_wrapper_subclass(packed) and hasattr(packed, "dequantize"):
        return packed.detach().dequantize()
    return None


@dataclass(frozen=True)
class _Plain:
    """A packed layer's forward with its dequantized weight."""

    owner: weakref.ref[nn.Module]
    """The layer, by weak reference to avoid a cycle."""

    def __call__(self, hidden: Tensor) -> Tensor:
        module = self.owner()
        if isinstance(module, nn.Embedding):
            return F.embedding(hidden, _needed(module), module.padding_idx)
        weight = _needed(module).to(hidden.dtype)
        bias = None if module.bias is None else module.bias.to(hidden.dtype)
        if not (torch.is_grad_enabled() and hidden.requires_grad):
            return F.linear(hidden, weight, bias)
        with made_again({weight.untyped_storage().data_ptr(): self._again}):
            return F.linear(hidden, weight, bias)

    def _again(self, saved: Tensor) -> Callable[[], Tensor]:
        """Return what dequantizes the weight again, or its transpose."""
        dtype, shape, stride = saved.dtype, saved.shape, saved.stride()
        return lambda: _needed(self.owner()).to(dtype).as_strided(shape, stride)


@torch.no_grad()
def _needed(module: nn.Module) -> Tensor:
    if (weight := _unpack(module)) is None:
        raise InputError(
            f"the bits of a {type(module).__name__} were rearranged for inference (by a pass in eval mode without "
            "gradients), and cannot be trained or measured any more; load the model again"
        )
    return weight
