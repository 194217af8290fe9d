"""What the graph of a model's blocks takes in memory, and blocks that are run again in the backward pass instead."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from gradscope.gradients.attention import probability_bytes

GRAPH = {"cpu": 4 << 30, "cuda": 8 << 30}
"""Bytes that a graph may take on a device; cuda: assumed to be there beside the weights."""
SAVED = 2
"""Numbers that a graph holds for each input, output and probability in the blocks; six architectures hold .8 to 1.8."""


def graph_room(model: nn.Module) -> int:
    """Return the bytes that a graph may take where the model is."""
    return GRAPH.get(next(model.parameters()).device.type, GRAPH["cuda"])


def graph_bytes(model: nn.Module, blocks: nn.ModuleList, rows: int, length: int) -> int:
    """Bound the bytes of a graph of the blocks over rows of this many tokens, with plain attention."""
    config, parameters = model.config.get_text_config(), list(blocks.parameters())
    visited = getattr(config, "num_experts_per_tok", None)
    sides = sum(sum(p.shape) for p in parameters if p.dim() == 2)
    sides += sum(sum(p.shape[1:]) * (visited or len(p)) for p in parameters if p.dim() == 3)  # [experts, rows, columns]
    width = max(4, parameters[0].element_size())
    return SAVED * (rows * length * sides * width + probability_bytes(model, rows, length))


def graph_fits(model: nn.Module, blocks: nn.ModuleList, length: int) -> bool:
    """Return whether a graph of the blocks over a sequence of this many tokens fits where the model is."""
    return graph_bytes(model, blocks, 1, length) <= graph_room(model)


def norms_bytes(model: nn.Module, blocks: nn.ModuleList, length: int) -> int:
    """Bound the bytes that norms along the graph of a sequence of this many tokens take beside the weights.

    The graph, and as much again for inputs, their factors and what flows back; or, where it does not fit, the blocks'
    inputs, one block's graph and a parameter's gradient, there twice while it is added up.
    """
    whole = graph_bytes(model, blocks, 1, length)
    if whole <= graph_room(model):
        return 2 * whole
    width = max(4, next(model.parameters()).element_size())
    inputs = len(blocks) * length * model.config.get_text_config().hidden_size * width
    return inputs + 2 * whole // len(blocks) + 2 * max(p.nbytes for p in model.parameters())


@contextmanager
def recomputing(model: nn.Module, blocks: nn.ModuleList, length: int) -> Iterator[None]:
    """Let a forward pass over this many tokens hold only the blocks' inputs, where the whole graph would not fit.

    Each backward pass then runs each block once more, with the hooks that it has by then.
    """
    if graph_fits(model, blocks, length):
        yield
        return
    before = [vars(block).get("forward") for block in blocks]
    try:
        for block in blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
        yield
    finally:
        for block, forward in zip(blocks, before, strict=True):
            del block.forward
            if forward is not None:
                block.forward = forward
