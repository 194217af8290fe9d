"""Gathering sharded weights in every process for a measurement during training.

All weights are gathered at once: a measurement holds several vectors of that size anyway, and with a copy of the
weights every process can compute independently, as under DDP. Gathering block by block would need communication in each
pass, with equally many passes in all processes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gradscope.errors import InputError, checked

_THEIRS = ("torch.distributed.fsdp.", "deepspeed.")
"""Modules whose hooks exchange weights, or count forward passes for training."""
_ZERO_3 = "ds_id"
"""Attribute of parameters sharded by DeepSpeed's ZeRO-3."""
_REPLACED = ("_parameters", "_forward_pre_hooks", "_forward_hooks")
"""Attributes of a module that are replaced while its weights are gathered."""


@checked
@contextmanager
def whole_weights(model: nn.Module, *, gradients: bool = False) -> Iterator[None]:
    """Replace the shards of FSDP2 (`fully_shard`) or ZeRO-3 by whole weights inside the block.

        with whole_weights(policy.model):
            table = measure(policy, batch)

    All processes enter together, between two training steps. Inside, each computes independently and needs memory for
    all weights. Afterwards shards, gradients, flags and hooks are restored, and changes to the whole weights are lost.
    Under DeepSpeed's ZeRO-1 and 2, which do not shard weights, only the hooks are removed. Other models are unchanged.

    Args:
        gradients: also gather FSDP's `.grad`.

    Raises:
        InputError: the weights are sharded in another way.
    """
    _refuse_other_shards(model)
    if not _is_shared(model):
        yield
        return
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # a forward pass may have left a unit gathered, in its compute dtype
    before = [(module, {name: vars(module)[name] for name in _REPLACED}) for module in model.modules()]
    copies: dict[int, nn.Parameter] = {}  # tied weights stay tied
    try:
        for module, kept in before:
            whole = {}
            for name, parameter in kept["_parameters"].items():
                if hasattr(parameter, "full_tensor") or hasattr(parameter, _ZERO_3):
                    if id(parameter) not in copies:
                        copies[id(parameter)] = _gather(parameter, gradients)
                    parameter = copies[id(parameter)]
                whole[name] = parameter
            module._parameters = whole
            module._forward_pre_hooks = _without_theirs(kept["_forward_pre_hooks"])
            module._forward_hooks = _without_theirs(kept["_forward_hooks"])
        yield
    finally:
        for module, kept in before:
            vars(module).update(kept)


def refuse_shards(model: nn.Module) -> None:
    """Raise InputError if a process lacks some of the model's weights, or FSDP's or DeepSpeed's hooks are active."""
    _refuse_other_shards(model)
    if _is_shared(model):
        raise InputError("the model is managed by FSDP or DeepSpeed; measure in `with gradscope.whole_weights(model):`")


def _refuse_other_shards(model: nn.Module) -> None:
    """Raise InputError for shards that `whole_weights` cannot gather."""
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise InputError("the weights are in flat shards (FSDP's first version); train with fsdp_version 2")
    if any(hasattr(parameter, "full_tensor") for parameter in model.parameters()) and not _is_shared(model):
        raise InputError("the weights are sharded, but not by fully_shard (tensor parallelism?); load them whole")


@torch.no_grad()
def _gather(shard: nn.Parameter, gradients: bool) -> nn.Parameter:
    """Return a shard's whole parameter; all processes call it."""
    if hasattr(shard, _ZERO_3):
        import deepspeed

        with torch.inference_mode(False), deepspeed.zero.GatheredParameters([shard]):
            return nn.Parameter(shard.detach().clone(), requires_grad=shard.requires_grad)
    if sum(not placement.is_replicate() for placement in shard.placements) > 1:
        raise InputError("the weights are cut up in more ways than fully_shard's; train without tensor parallelism")

    def whole(tensor: Tensor) -> Tensor:
        # What the CPU keeps for a GPU is gathered there; a single process's shard would be the weight itself.
        return tensor.detach().to(shard.device_mesh.device_type).full_tensor().clone()

    with torch.inference_mode(False):
        made = nn.Parameter(whole(shard), requires_grad=shard.requires_grad)
        if gradients and shard.grad is not None:
            made.grad = whole(shard.grad)
    return made


def _is_shared(model: nn.Module) -> bool:
    """Return whether FSDP or DeepSpeed sees to the weights, by hooks or by shards."""
    hooked = any(_is_theirs(hook) for module in model.modules() for hook in module._forward_pre_hooks.values())
    return hooked or any(hasattr(parameter, _ZERO_3) for parameter in model.parameters())


def _is_theirs(hook: Callable[..., Any]) -> bool:
    return (getattr(hook, "__module__", None) or "").startswith(_THEIRS)


def _without_theirs(hooks: Mapping[int, Callable[..., Any]]) -> OrderedDict[int, Callable[..., Any]]:
    return OrderedDict((number, hook) for number, hook in hooks.items() if not _is_theirs(hook))
