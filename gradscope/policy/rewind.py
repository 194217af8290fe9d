"""Training a model temporarily, then restoring it bit for bit."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor, nn

from gradscope.policy.parameters import model_bytes, say_restored, weights_version
from gradscope.runs import check_room, scratch_zeros


@contextmanager
def restoring(model: nn.Module, *, memory: int | None = None) -> Iterator[Mapping[str, Tensor]]:
    """Restore the model and all random states bit for bit at the end of the block, even after an exception.

    Yields the parameters' initial values by name; every `.grad` starts as None. Restored are the values of parameters
    and buffers in the same tensors, the modules' references to them, `.grad`, requires_grad, training modes, and the
    random states of torch (including each GPU, once CUDA is in use), numpy and Python.
    Takes a copy of the model; above `memory` bytes (None: no limit), in scratch files on the host. Raises InputError if
    the disk has no room.
    """
    copy = torch.clone
    if memory is not None and model_bytes(model) > memory:
        check_room(model_bytes(model))
        copy = _copy_to_scratch
    states = _random_states()
    modules = [(m, m.training, dict(m._parameters), dict(m._buffers)) for m in model.modules()]
    parameters = [(p, p.requires_grad, p.grad) for p in model.parameters()]
    values = {name: copy(p.detach()) for name, p in model.named_parameters()}
    pairs = zip(model.parameters(), values.values(), strict=True)
    tensors = [(p, p.data, value) for p, value in pairs]
    version = weights_version(model)
    tensors += [(b, b.data, copy(b.detach())) for b in model.buffers()]
    try:
        for parameter, _, _ in parameters:
            parameter.grad = None
        yield MappingProxyType(values)
    finally:
        for module, training, own_parameters, own_buffers in modules:
            module.training = training
            _refill(module._parameters, own_parameters)
            _refill(module._buffers, own_buffers)
        for tensor, memory, value in tensors:
            tensor.data = memory
            if not _is_expanded(memory):
                memory.copy_(value)
        say_restored(model, version)
        for parameter, flag, gradient in parameters:
            parameter.requires_grad_(flag)
            parameter.grad = gradient
        _set_random_states(states)


def _refill(mapping: dict[str, Tensor | None], content: dict[str, Tensor | None]) -> None:
    mapping.clear()
    mapping.update(content)


def _copy_to_scratch(tensor: Tensor) -> Tensor:
    return scratch_zeros(*tensor.shape, dtype=tensor.dtype).copy_(tensor)


def _is_expanded(tensor: Tensor) -> bool:
    """Return whether several entries share memory, in which case torch refuses to write."""
    return any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True))


def _random_states() -> tuple:
    """Return the random states of Python, numpy and torch on the CPU and, once CUDA is in use, on each GPU."""
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), gpus


def _set_random_states(states: tuple) -> None:
    python, numpy, cpu, gpus = states
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(cpu)
    if gpus:
        torch.cuda.set_rng_state_all(gpus)
