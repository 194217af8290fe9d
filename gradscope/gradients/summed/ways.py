"""Which way summed gradients are made, by a budget of memory and by what each way costs; see `prompts` for the ways.

Inner products of a linear layer's gradients could also be had without these, from those of all pairs of positions; with
four intervals that takes fewer FLOPs only for a batch of fewer positions than about half of the layer's width, and is
not done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Int
from torch import Tensor

from gradscope.errors import InputError
from gradscope.gradients.forward_mode import BACKWARD
from gradscope.gradients.sketches import BLOCKS
from gradscope.objective import fitting_size, micro_batches
from gradscope.policy import Policy, float_parameters
from gradscope.rollouts import TokenBatch

Way = Literal["whole", "slices", "sketches"]


Index = tuple[Int[Tensor, " K"], Int[Tensor, " K"]]
"""Rows and columns in the batch of a piece's kept tokens."""


Piece = tuple[Index, TokenBatch]


SKETCH = 1 << 16
"""Numbers of a sketch: errors of inner products are 1/256 of the norms' product."""


LEAST_SKETCH = 1 << 10


MOST_SLICES = 1 << 12
"""Most slices of the parameters: smaller ones are made of overhead."""


DEAREST = 2.0
"""Times the cost of sketches, up to which exact slices are taken."""


WRITING = 1000.0
"""FLOPs in whose time a number of a vector is written, scaled, multiplied or sketched, beside the products that make
it: 900 to 1,200 measured at 0.5 B on two cores."""


@dataclass(frozen=True)
class Sizes:
    """What the cost of summed gradients depends on."""

    parameters: int
    """Measured ones."""
    segments: tuple[int, ...]
    """Parameters of each block, and of all that is in none, last."""
    largest: int
    """Numbers of the largest parameter."""
    hidden: int
    """Width of the residual stream."""
    positions: int
    """Positions of all responses with their prompts, padded as they are passed."""
    masks: int
    """Numbers of the attention masks that a forward pass makes of them."""
    prompts: int
    piece: int
    """Positions of the largest piece of a prompt that is passed at once."""
    width: int = 4
    """Bytes of a number: 4, or 8 in float64."""

    @classmethod
    def of(
        cls,
        policy: Policy,
        batch: TokenBatch,
        *,
        micro_batch_size: int = 8,
        dtype: torch.dtype | None = None,
        device: str | None = None,
    ) -> Sizes:
        prompts = own_rows(batch)
        cut = cut_prompts(policy, batch, prompts, micro_batch_size, device)
        shapes = [piece.input_ids.shape for pieces in cut for _, piece in pieces]
        named = float_parameters(policy.model)
        within = [{id(p) for p in block.parameters()} for block in policy.blocks]
        sizes = [sum(p.numel() for _, p in named if id(p) in ids) for ids in within]
        total = sum(p.numel() for _, p in named)
        return cls(
            total,
            (*sizes, total - sum(sizes)),
            max(p.numel() for _, p in named),
            policy.config.hidden_size,
            sum(b * n for b, n in shapes),
            sum(b * n**2 for b, n in shapes),
            len(prompts),
            max((b * n for b, n in shapes), default=0),
            torch.finfo(torch.promote_types(dtype or policy.dtype, torch.float32)).bits // 8,
        )


@dataclass(frozen=True)
class SumsPlan:
    """How summed gradients are made, and what that costs."""

    way: Way
    memory: int
    """Budget, bytes."""
    slice_width: int
    """Numbers of a part of each vector; of a sketch its size."""
    parts: int
    blocks: int
    """How many parts of a sketch's coordinates have their inner products kept apart; 1 for exact vectors."""
    forward_passes: float
    """What making the vectors once costs, in forward passes over the batch (a backward pass counts as two)."""
    sketched_passes: float | None
    """The same of sketches; None where the budget does not hold them."""

    @property
    def sketch_size(self) -> int | None:
        return self.slice_width if self.way == "sketches" else None

    def __str__(self) -> str:
        cost = f"about {self.forward_passes:.0f} forward passes over the batch"
        if self.way == "whole":
            return f"summed gradients: exact, all parameters at once, {cost}"
        if self.way == "slices":
            return f"summed gradients: exact, in {self.parts} slices of the parameters, {cost}"
        return (
            f"summed gradients: sketches of {self.slice_width:,} numbers, {cost}; inner products err by "
            f"{self.slice_width**-0.5:.1%} of the norms' product (one standard deviation)"
        )


def plan_sums(
    sizes: Sizes, *, rows: int, held: int, memory: int, metric: bool = False, way: Way | None = None
) -> SumsPlan:
    """The way to make `rows` vectors for each prompt, of which `held` are kept at a time by what uses them.

    held: vectors in memory until all prompts are done, `rows` × prompts if each is kept. memory: bytes for vectors, for
    what lies between the passes and for sketches. metric: the sum of all vectors is wanted, too, which counts where
    vectors are whole and else lies in a scratch file. way: this one, in place of the cheapest exact one up to DEAREST
    times as dear as sketches, and then those. Raises InputError where the budget does not hold it.
    """
    vectors, width = held + rows + 1, sizes.width  # and the gradients of a part as autograd returns them
    # Of a forward pass a parameter and a position take two operations.
    writing = WRITING * rows * sizes.prompts / (2 * max(1, sizes.positions))
    backward = 1 + BACKWARD * rows + writing
    sketching = backward + 1  # as a rule block by block, each run once more
    room = memory - slices_memory(sizes, rows=rows, held=held, width=0)
    slice_width = min(sizes.parameters, max(0, room) // (vectors * width))
    # A block that is cut is run again for each of its slices.
    cuts = [max(1.0, size / slice_width) if slice_width else float("inf") for size in sizes.segments]
    dear = sum(c * s for c, s in zip(cuts, sizes.segments, strict=True)) / max(1, sizes.parameters)
    pairs = 4 * held**2 / max(1, sizes.positions)  # inner products of all, in float64
    dearer = 2 + rows + (1 + rows) * dear + pairs + writing
    # Of a table that embedding and head share, both gradients and their sum are there at once, or all of a block.
    states = (len(sizes.segments) + rows) * sizes.piece * sizes.hidden
    transient = (max(3 * sizes.largest, *sizes.segments[:-1]) + states) * width
    kept, products = (held + rows) * width, 8 * held**2
    blocks = BLOCKS if 4 * (BLOCKS + 1) * products <= memory else BLOCKS // 4
    transient += (blocks + 1) * products
    size = SKETCH
    while size > LEAST_SKETCH and kept * size > memory - transient:
        size //= 2
    enough = {
        "whole": (vectors + metric) * sizes.parameters * width,
        "slices": slices_memory(sizes, rows=rows, held=held, width=max(1, sizes.parameters // MOST_SLICES)),
        "sketches": transient + kept * size,
    }
    fits = [name for name in enough if enough[name] <= memory]
    sketched = sketching if "sketches" in fits else None
    if way is None and "slices" in fits and sketched is not None and dearer > DEAREST * sketched:
        fits.remove("slices")
    if way is not None:
        fits = [way] if way in fits else []
    if not fits:
        least = min(enough.values()) if way is None else enough[way]
        raise InputError(
            f"summed gradients need {_in_words(least)} at least and the budget is {_in_words(memory)}; give "
            f"--gradient-memory {least} or more, or fewer responses"
        )
    made = {
        "whole": (sizes.parameters, 1, 1, backward),
        "slices": (slice_width, _count(sizes, slice_width), 1, dearer),
        "sketches": (size, 1, blocks, sketching),
    }
    return SumsPlan(fits[0], memory, *made[fits[0]], sketched)


def slices_memory(sizes: Sizes, *, rows: int, held: int, width: int) -> int:
    """Bytes that slices of this width take: vectors, one gradient of the largest parameter, states between blocks."""
    states = (len(sizes.segments) + rows) * sizes.positions * sizes.hidden + sizes.masks
    return sizes.width * (sizes.largest + states + (held + rows + 1) * width)


def _count(sizes: Sizes, width: int) -> int:
    return 1 if width == 0 else len(cut_slices([(str(i), n) for i, n in enumerate(sizes.segments)], width))


def _in_words(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 1 << 28 else f"{size:,} bytes"


def own_rows(batch: TokenBatch) -> list[Int[Tensor, " b"]]:
    """Rows of the batch by prompt; without a token there is no gradient, and no prompt."""
    prompts = batch.group_ids[batch.response_mask.any(1)].unique()
    return [(batch.group_ids == prompt).nonzero()[:, 0] for prompt in prompts]


def cut_prompts(
    policy: Policy,
    batch: TokenBatch,
    prompts: Sequence[Int[Tensor, " b"]],
    micro_batch_size: int,
    device: str | None = None,
) -> list[list[Piece]]:
    size = fitting_size(policy.model, batch, micro_batch_size, copies=4, device=device)
    return [_make_pieces(batch, own, size) for own in prompts]


def _make_pieces(batch: TokenBatch, own: Int[Tensor, " b"], size: int) -> list[Piece]:
    """Micro-batches of some rows, each with where its kept tokens stand in the batch."""
    start, found = batch.attention_mask.int().argmax(1), []
    for rows, piece in micro_batches(batch.select(own), size):
        row, column = piece.response_mask.nonzero().unbind(1)
        rows = own[rows[row]]
        found.append(((rows, start[rows] + column), piece))
    return found


def cut_slices(named: Sequence[tuple[str, int]], width: int) -> list[list[tuple[str, int, int]]]:
    """(name, first, one past the last) of consecutive entries, in lists of `width` entries.

    >>> cut_slices([("a", 3), ("b", 2)], 4)
    [[('a', 0, 3), ('b', 0, 1)], [('b', 1, 2)]]
    """
    parts, room = [], 0
    for name, size in named:
        at = 0
        while at < size:
            if not room:
                parts.append([])
                room = width
            taken = min(room, size - at)
            parts[-1].append((name, at, at + taken))
            at, room = at + taken, room - taken
    return parts
