"""The memory of the autograd graph of a model's blocks, and recomputation where it does not fit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from gradscope.gradients.attention import probability_bytes
from gradscope.gradients.hooks import replaced_forwards
from gradscope.policy import largest_setting

GRAPH = {"cpu": 4 << 30, "cuda": 8 << 30}
"""Bytes allowed for a graph, by device; cuda: assumed to be free beside the weights."""
SAVED = 2
"""Numbers stored in a graph per input, output and attention probability; .8 to 1.8 for six architectures."""


def graph_room(model: nn.Module) -> int:
    """Return the bytes allowed for a graph on the model's device."""
    return GRAPH.get(next(model.parameters()).device.type, GRAPH["cuda"])


def graph_bytes(model: nn.Module, blocks: nn.ModuleList, rows: int, length: int) -> int:
    """Bound the bytes of the blocks' graph over `rows` sequences of this length, with plain attention."""
    parameters, visited = list(blocks.parameters()), largest_setting(model, "num_experts_per_tok")
    sides = sum(sum(p.shape) for p in parameters if p.dim() == 2)
    sides += sum(sum(p.shape[1:]) * (visited or len(p)) for p in parameters if p.dim() == 3)  # [experts, rows, columns]
    width = max(4, parameters[0].element_size())
    return SAVED * (rows * length * sides * width + probability_bytes(model, rows, length))


def graph_fits(model: nn.Module, blocks: nn.ModuleList, length: int) -> bool:
    """Return whether the blocks' graph over a sequence of this length fits on the model's device."""
    return graph_bytes(model, blocks, 1, length) <= graph_room(model)


def norms_bytes(model: nn.Module, blocks: nn.ModuleList, length: int) -> int:
    """Bound the bytes, beside the weights, of measuring norms by autograd for a sequence of this length.

    If the graph fits: twice its size, for inputs, their factors and gradients. Else: the blocks' inputs, one block's
    graph, and two copies of a parameter's gradient.
    """
    whole = graph_bytes(model, blocks, 1, length)
    if whole <= graph_room(model):
        return 2 * whole
    width = max(4, next(model.parameters()).element_size())
    inputs = len(blocks) * length * model.config.get_text_config().hidden_size * width
    return inputs + 2 * whole // len(blocks) + 2 * max(p.nbytes for p in model.parameters())


def recomputing(model: nn.Module, blocks: nn.ModuleList, length: int) -> AbstractContextManager[None]:
    """Checkpoint each block, which then runs again in the backward pass, if this many tokens' graph would not fit."""

    def again(_index: int, block: nn.Module) -> Callable[..., Any]:
        return partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)

    return nullcontext() if graph_fits(model, blocks, length) else replaced_forwards(blocks, again)
