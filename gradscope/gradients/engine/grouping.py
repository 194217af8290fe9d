"""Chunks of tokens to measure together: neighbours in a few sequences, over their longest prefix."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

MOST_SEQUENCES = 8
"""At S, T = 64 in analyses/benchmarks/token_gradients.py, eight are a third faster than one, and so are four."""
POSITION_COST = 3
"""Cost of a position's forward pass, head and factors, in positions × tokens: 2 to 4 at M and S."""
WORTHWHILE = 0.03
"""Least fraction of its own cost that a sequence must save to join a group, since its activations are held longer."""
ROWS = 1536
"""Default size of a chunk in positions × tokens, if its start-up cost does not call for more."""
START_PART = 1 / 18
"""Largest fraction of a chunk's time to spend on starting it. At S, T = 64 and 128, chunks of 3,072 rows are 3 and 6 %
faster than chunks of 1,536; with hidden 64, chunks of 12,288 are 14 and 19 % faster; if starting is cheap, longer
chunks gain nothing."""


@dataclass(frozen=True)
class Span:
    """Neighbouring tokens that share one backward pass."""

    tokens: tuple[slice, ...]
    """Slice of tokens of each sequence that has any; the first has the most."""
    length: int
    """Length of the longest prefix."""

    @property
    def width(self) -> int:
        """Number of places per sequence: the largest number of tokens."""
        return self.tokens[0].stop - self.tokens[0].start

    @property
    def rows(self) -> int:
        """Positions × places."""
        return self.places * self.length

    @property
    def places(self) -> int:
        """Places for tokens, equally many for every sequence."""
        return len(self.tokens) * self.width


@dataclass(frozen=True)
class Chunk:
    """A chunk's tokens in a rectangular array; sequences with fewer tokens leave their first places empty."""

    picks: Int[Tensor, "B K"]
    """The stack's target at each place; 0 if empty."""
    positions: Int[Tensor, "B K"]
    """Position of each token's logits; 0 if empty."""
    held: Int[Tensor, " t"] | None
    """Indices of the B·K places that hold a token; None: all."""
    length: int
    """Length of the longest prefix."""

    @classmethod
    def of(
        cls,
        span: Span,
        picks: Sequence[Int[Tensor, " _"]],
        positions: Int[Tensor, " m"],
        device: torch.device | None = None,
    ) -> Chunk:
        """Make a chunk of a span.

        picks: the group's tokens among a stack's targets, by sequence; positions: the stack's; both on the CPU.
        device: where to put the chunk; None: the CPU.
        """
        parts = [picks[b][tokens] for b, tokens in enumerate(span.tokens)]
        rectangle = torch.stack([torch.cat([part.new_full((span.width - len(part),), -1), part]) for part in parts])
        holds = rectangle >= 0
        values = [rectangle.clamp(min=0), positions[rectangle] * holds]
        values += [] if holds.all() else [holds.flatten().nonzero()[:, 0]]
        picked, at, *held = (value.to(device, non_blocking=True) for value in values)
        return cls(picked, at, held[0] if held else None, span.length)

    def values(self, tokens: Tensor) -> Tensor:
        """Select the values at places with a token, [B, K, …] → [tokens, …]."""
        flat = tokens.flatten(0, 1)
        return flat if self.held is None else flat[self.held]


@dataclass(frozen=True)
class Limits:
    """Limits on a chunk, in positions × tokens: the rows of its matrix products."""

    rows: int
    """Most rows of a chunk; one token per sequence is always allowed."""
    start: int | None
    """Cost of starting a chunk in rows; None: chunks end only at gaps of over 16 positions and ¼ of the shortest
    prefix."""
    shared: float = 0.0
    """Cost of fetching what a chunk's tokens share, in rows per position and sequence."""

    def fixed(self, batch: int, length: int) -> float:
        """Return the fixed cost of a chunk."""
        return (self.start or 0) + self.shared * batch * length


def neighbours(lengths: Sequence[Sequence[int]], limits: Limits) -> Iterator[Span]:
    """Divide tokens with ascending prefix lengths into chunks, starting from the last token.

    A chunk grows until padding its shorter prefixes to the longest would cost more than starting another chunk.
    lengths: prefix lengths by sequence of a group, sequences with more tokens first.

    >>> [(span.tokens, span.length) for span in neighbours([[10, 11, 12, 40]], Limits(rows=1000, start=None))]
    [((slice(3, 4, None),), 40), ((slice(0, 3, None),), 12)]
    >>> [(span.tokens, span.length) for span in neighbours([[10, 11], [9]], Limits(rows=1000, start=2))]
    [((slice(1, 2, None), slice(0, 1, None)), 11), ((slice(0, 1, None),), 10)]
    """
    end = 0  # tokens already in chunks, counted from the last
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
    """Group chunks to carry through a block together: up to this many rows in total, or a single chunk.

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
    """Group sequences of similar length to measure together, in the order that `neighbours` expects; return indices.

    A sequence joins a group if they cost less together. Without a start-up cost each sequence is alone, as are those
    without tokens.

    Args:
        lengths: as for `neighbours`, in any order.
        reaches: length of each sequence, up to its last response token.
        most: number of sequences of a given length that fit into memory together.
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
