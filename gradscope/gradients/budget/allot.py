"""What a time limit allows, told from the lengths of a batch and the seconds of one forward pass.

Every price is in forward passes over a prompt. In units of the variance between prompts, a share of Σ‖w·g‖² has
variance (1 + APART/k)/m from m prompts of which k tokens of each interval of π are measured. In the time for m prompts
at p + k·t seconds each this is smallest at k = √(APART·p/t), however long or short the time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, sqrt
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from gradscope.gradients.engine.grouping import POSITION_COST
from gradscope.resampling import FEWEST
from gradscope.runs import SILENT

if TYPE_CHECKING:
    from gradscope.gradients.operator.jacobian import TokenJacobian
    from gradscope.rollouts import TokenBatch

APART = 25.0
"""Variance of a share of Σ‖w·g‖² from measuring one token per interval, relative to that from one prompt. Measured for
[0, ¼): 14 for the embedded policy (ten prompts, 300 tokens per interval), 39 to 52 for SmolLM2-135M-Instruct (16
prompts, 76 tokens per interval)."""
ENOUGH = 30
"""Measured tokens per interval of π that usually give a confidence interval: an effective sample of six. SmolLM2 needs
19 to 24; how many a sample by prompt has is random."""
AFTER = 8.0
"""Seconds for everything else, the self-check and the page, on processors of its own; times `Stopwatch.slowness`."""
MARGIN = 1.2
"""Factor on the time that everything, or a verdict, is estimated to take."""
ROOM = 2 * FEWEST
"""Prompts that must fit beside whatever does not belong to a verdict, for time to be kept for it."""


@dataclass(frozen=True)
class Afterwards:
    """What follows the table within the same minutes."""

    passes: tuple[float, ...] = ()
    """Price of each step in forward passes over the batch, in order; time is kept for the first ones that fit."""
    essential: int = 1
    """How many of them belong to a verdict: time is kept for these if they fit beside the prompts that it needs, and
    for others beside ROOM."""
    prompts: int | None = None
    """Most prompts that it takes in; None: all."""
    least: int = 1
    """Fewest prompts that it takes in, however long they take."""


@dataclass(frozen=True)
class Lengths:
    """Means over the prompts of a batch."""

    positions: float
    """Positions of a forward pass over a prompt's responses."""
    responses: float
    reach: float
    """Positions of one response."""
    prefix: float
    """Tokens before a response token."""
    tokens: float
    """Response tokens."""

    @classmethod
    def of(cls, batch: TokenBatch) -> Lengths:
        kept = batch.response_mask.any(1)
        prompts = len(batch.group_ids[kept].unique())
        ends = [batch.sequence(row)[1] for row in kept.nonzero()[:, 0].tolist()]
        positions = float(batch.attention_mask[kept].sum())
        each = positions / prompts, len(ends) / prompts, positions / len(ends)
        return cls(*each, float(torch.cat(ends).double().mean()), batch.num_tokens / prompts)

    def measuring(self, each: float | None, intervals: int) -> float:
        """Return the price of measuring so many tokens of each interval of a prompt, or all, in forward passes.

        A position that a backward pass carries for a token counts as one of a forward pass; SmolLM2-135M-Instruct
        takes .6 to .9.
        """
        tokens = self.tokens if each is None else min(self.tokens, each * intervals)
        shared = POSITION_COST * self.reach * min(self.responses, tokens)
        return (tokens * self.prefix + shared) / self.positions


@dataclass(frozen=True)
class Allotment:
    """How the minutes are used."""

    prompts: int
    """Expected number of prompts."""
    each: int | None
    """Tokens to measure of each interval of a prompt; None: all."""
    reserved: float = 0.0
    """Forward passes over the batch for which time is kept."""
    verdict: float | None = None
    """Seconds that would give a verdict, if these do not; None: they do, or none would."""
    needed: int = 1
    """Prompts that a verdict needs or, where none is possible, the fewest that are taken in."""


def allot(
    seconds: float,
    scoring: float,
    lengths: Lengths,
    following: Afterwards,
    *,
    prompts: int,
    intervals: int,
    wanted: int | None,
    again: bool = False,
) -> Allotment:
    """Decide how many tokens of each prompt are measured, and for what time is kept.

    Args:
        seconds: that are left.
        scoring: seconds of a forward pass over a prompt, on average.
        prompts: number of prompts.
        intervals: number of intervals of π.
        wanted: prompts to look at for a verdict; None: even all are too few.
        again: tokens are measured once more after the sum, in AdamW's metric.

    >>> lengths = Lengths(positions=1200, responses=8, reach=150, prefix=110, tokens=340)
    >>> allot(600.0, 2.0, lengths, Afterwards((10.0, 28.0)), prompts=16, intervals=4, wanted=7)
    Allotment(prompts=11, each=31, reserved=10.0, verdict=None, needed=7)
    """

    def price(each: int | None, reserved: float) -> float:
        """Return the seconds of a prompt."""
        return scoring * (1 + reserved + (1 + again) * lengths.measuring(each, intervals))

    def fits(count: int, each: int | None, reserved: float) -> bool:
        return count * price(each, reserved) <= seconds

    whole, needed = sum(following.passes), wanted or min(following.least, prompts)
    if following.prompts in (None, prompts) and MARGIN * prompts * price(None, whole) <= seconds:
        return Allotment(prompts, None, whole, needed=needed)
    least, reserved = ceil(ENOUGH / needed), 0.0
    for place, passes in enumerate(following.passes):
        room = needed if place < following.essential else min(prompts, max(needed, ROOM))
        if not fits(room, least, reserved + passes):
            break
        reserved += passes
    carried = (1 + again) * intervals * lengths.prefix / lengths.positions
    fixed = 1 + reserved + (1 + again) * POSITION_COST
    each = max(least, ceil(sqrt(APART * fixed / carried)))
    while each > least and not fits(needed, each, reserved):
        each = max(least, each // 2)
    expected = int(min(prompts, max(following.least, seconds / price(each, reserved))))
    verdict = needed * price(least, sum(following.passes[: following.essential]))
    short = wanted is not None and verdict > seconds
    return Allotment(expected, each, reserved, MARGIN * verdict if short else None, needed)


def time_position(J: TokenJacobian) -> float:
    """Return the seconds of one position of a forward pass, from two passes over a response of median length.

    The first pass includes one-off preparations.
    """
    lengths, rows = J.batch.attention_mask.sum(1), J.batch.response_mask.any(1).nonzero()[:, 0]
    one = J.within(replace(J.resources, progress=SILENT)).select(rows[lengths[rows].argsort()[[len(rows) // 2]]])
    taken = []
    for _ in range(2):
        start = perf_counter()
        _ = one.moved().statistics
        taken.append(perf_counter() - start)
    return min(taken) / float(one.batch.attention_mask.sum())
