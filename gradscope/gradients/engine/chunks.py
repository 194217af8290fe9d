"""Which tokens are measured together: neighbours, of a few sequences at once, over the longest prefix among them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

MOST_SEQUENCES = 8
"""Most sequences in a group: eight are a third faster than one at S and T = 64 of
analyses/benchmarks/token_gradients.py, as four are.
"""
POSITION_COST = 3
"""Positions × tokens that take as long as the forward pass, the head and the factors of a position: 2 to 4 at M, S."""
WORTHWHILE = 0.03
"""Share of its own cost that a sequence must save to join a group, since its activations are held meanwhile."""
ROWS = 1536
"""Positions × tokens of a chunk, unless its start-up cost calls for more."""
START_PART = 1 / 18
"""Share of a chunk's time that starting it may take. At S, T = 64 and 128, chunks of 3,072 rows are 3 and 6 % faster
than of 1,536; with hidden 64, those of 12,288 are 14 and 19 % faster; where starting costs less, longer ones gain
nothing."""


@dataclass(frozen=True)
class Span:
    """Neighbouring tokens that one backward pass carries."""

    tokens: tuple[slice, ...]
    """Slice of tokens of each sequence that has any; the first has most."""
    length: int
    """Longest prefix."""

    @property
    def width(self) -> int:
        """Most tokens of one sequence, which is the number of places of each."""
        return self.tokens[0].stop - self.tokens[0].start

    @property
    def rows(self) -> int:
        """Positions × places for a token."""
        return self.places * self.length

    @property
    def places(self) -> int:
        """Places for tokens: the same number for every sequence."""
        return len(self.tokens) * self.width


@dataclass(frozen=True)
class Chunk:
    """A chunk's tokens in a rectangle of places; sequences with fewer tokens leave their first places empty."""

    picks: Int[Tensor, "B K"]
    """Target of the stack at each place; 0 at an empty one."""
    positions: Int[Tensor, "B K"]
    """Position of each token's logits; 0 at an empty place."""
    held: Int[Tensor, " t"] | None
    """Which of the B·K places hold a token; None: all."""
    length: int
    """Longest prefix."""

    @classmethod
    def of(
        cls,
        span: Span,
        picks: Sequence[Int[Tensor, " _"]],
        positions: Int[Tensor, " m"],
        device: torch.device | None = None,
    ) -> Chunk:
        """picks: the group's tokens among a stack's targets, by sequence; positions: the stack's; both on the CPU.

        device: where the chunk goes, None: it stays.
        """
        parts = [picks[b][tokens] for b, tokens in enumerate(span.tokens)]
        rectangle = torch.stack([torch.cat([part.new_full((span.width - len(part),), -1), part]) for part in parts])
        holds = rectangle >= 0
        values = [rectangle.clamp(min=0), positions[rectangle] * holds]
        values += [] if holds.all() else [holds.flatten().nonzero()[:, 0]]
        picked, at, *held = (value.to(device, non_blocking=True) for value in values)
        return cls(picked, at, held[0] if held else None, span.length)

    def values(self, tokens: Tensor) -> Tensor:
        """Return the values at places with a token, [tokens, …], from [B, K, …]."""
        flat = tokens.flatten(0, 1)
        return flat if self.held is None else flat[self.held]


@dataclass(frozen=True)
class Limits:
    """Limits of a chunk in positions × tokens, the rows of its matrix products."""

    rows: int
    """Most rows of a chunk; a single token of each sequence may exceed it."""
    start: int | None
    """Rows that take as long as starting a chunk; None: chunks end only at gaps of more than 16 positions and a quarter
    of the shortest prefix.
    """
    shared: float = 0.0
    """Rows that take as long as fetching what a chunk's tokens share, at one position of one sequence."""

    def fixed(self, batch: int, length: int) -> float:
        """Return the cost of a chunk before it carries any token."""
        return (self.start or 0) + self.shared * batch * length


def neighbours(lengths: Sequence[Sequence[int]], limits: Limits) -> Iterator[Span]:
    """Divide tokens of ascending prefix lengths into chunks, from the last on; each is carried over its longest prefix.

    A chunk goes on until the padding after its shorter tokens' own ends would cost more than another chunk.
    lengths: of each sequence of a group, those with more tokens first.

    >>> [(span.tokens, span.length) for span in neighbours([[10, 11, 12, 40]], Limits(rows=1000, start=None))]
    [((slice(3, 4, None),), 40), ((slice(0, 3, None),), 12)]
    >>> [(span.tokens, span.length) for span in neighbours([[10, 11], [9]], Limits(rows=1000, start=2))]
    [((slice(1, 2, None), slice(0, 1, None)), 11), ((slice(0, 1, None),), 10)]
    """
    end = 0  # tokens that are dealt with, counted from the last
    while end < len(lengths[0]):
        start, batch = end, sum(len(tokens) > end for tokens in lengths)
        longest, wasted = max(tokens[-1 - start] for tokens in lengths[:batch]), 0
        while end < len(lengths[0]):
            column = [tokens[-1 - end] if len(tokens) > end else 0 for tokens in lengths[:batch]]
            wasted += sum(longest - length for length in column)
            if limits.start is None:
                too_far = longest > max(column[0] + 16, column[0] * 5 // 4)
            else:
                too_far = wasted > limits.fixed(batch, longest)
            if end > start and (too_far or longest * batch * (end - start + 1) > limits.rows):
                break
            end += 1
        parts = (slice(max(0, len(tokens) - end), len(tokens) - start) for tokens in lengths[:batch])
        yield Span(tuple(parts), longest)


def waves(spans: Iterable[Span], rows: int) -> Iterator[list[Span]]:
    """Group the chunks that are carried through a block together: up to this many rows in all, or a single chunk.

    >>> spans = [Span((slice(start, start + 2),), 10) for start in (4, 2, 0)]
    >>> [len(wave) for wave in waves(spans, 40)]
    [2, 1]
    """
    wave: list[Span] = []
    for span in spans:
        if wave and sum(each.rows for each in [*wave, span]) > rows:
            yield wave
            wave = []
        wave.append(span)
    if wave:
        yield wave


def group_sequences(
    lengths: Sequence[Sequence[int]], reaches: Sequence[int], limits: Limits, *, most: Callable[[int], int]
) -> list[list[int]]:
    """Group sequences to measure together, of like length and in the order that `neighbours` wants; return their
    indices.

    A sequence joins a group where they cost less together; without a price of starting a chunk, each is alone, as is
    one without tokens. lengths: as of `neighbours`, in any order. reaches: how long each sequence is, which is more
    where its last tokens are not measured. most: of sequences so long that may lie in memory together.
    """
    groups = [[index] for index, tokens in enumerate(lengths) if not tokens]
    reach, cost, open_group = 0, 0.0, None
    for index in sorted((i for i, tokens in enumerate(lengths) if tokens), key=lambda i: -reaches[i]):
        alone = _cost(lengths, [index], limits) + POSITION_COST * reaches[index]
        if open_group is not None and len(open_group) < min(MOST_SEQUENCES, most(reach)):
            together = sorted([*open_group, index], key=lambda i: (-len(lengths[i]), i))
            joined = _cost(lengths, together, limits) + POSITION_COST * reach * len(together)
            if joined <= cost + (1 - WORTHWHILE) * alone:
                open_group[:], cost = together, joined
                continue
        groups.append([index])
        reach, cost, open_group = reaches[index], alone, groups[-1] if limits.start is not None else None
    return groups


def _cost(lengths: Sequence[Sequence[int]], group: list[int], limits: Limits) -> float:
    """Return the cost of a group's chunks."""
    spans = neighbours([lengths[i] for i in group], limits)
    return sum(span.rows + limits.fixed(len(span.tokens), span.length) for span in spans)
