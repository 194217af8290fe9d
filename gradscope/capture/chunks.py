"""Which tokens are measured together: neighbours, of a few sequences at once, over the longest prefix among them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

MOST_SEQUENCES = 8
"""In a group; more gained little at S and M of analyses/benchmarks/token_gradients.py."""
WORTHWHILE = 0.02
"""Part of its own cost that a sequence must save to join a group, as each holds its activations meanwhile."""


@dataclass(frozen=True)
class Run:
    """Neighbouring tokens that one backward pass carries."""

    tokens: tuple[slice, ...]
    """Of each sequence, as many sequences of the group as have any; the first has most."""
    length: int
    """Longest prefix."""

    @property
    def width(self) -> int:
        """Most tokens of one sequence: as many places has each."""
        return self.tokens[0].stop - self.tokens[0].start

    @property
    def rows(self) -> int:
        """Positions × places."""
        return len(self.tokens) * self.width * self.length


@dataclass(frozen=True)
class Chunk:
    """A run's tokens in a rectangle of places; a sequence with fewer than others has none in its first places."""

    picks: Int[Tensor, "B K"]
    """Which of the stack's targets a place holds; 0 where it holds none."""
    positions: Int[Tensor, "B K"]
    """Where each token's logits stand; 0 where there is none."""
    held: Bool[Tensor, "B K"] | None
    """Which places hold a token; None: all."""
    length: int
    """Longest prefix."""

    @classmethod
    def of(cls, run: Run, picks: Sequence[Int[Tensor, " _"]], positions: Int[Tensor, " m"]) -> Chunk:
        """picks: the group's tokens among a stack's targets, by sequence; positions: the stack's."""
        parts = [picks[b][tokens] for b, tokens in enumerate(run.tokens)]
        if all(len(part) == run.width for part in parts):
            rectangle = torch.stack(parts)
            return cls(rectangle, positions[rectangle], None, run.length)
        rectangle = torch.stack([torch.cat([part.new_full((run.width - len(part),), -1), part]) for part in parts])
        held = rectangle >= 0
        rectangle = rectangle.clamp(min=0)
        return cls(rectangle, positions[rectangle] * held, held, run.length)

    def values(self, tokens: Tensor) -> Tensor:
        """Of the places that hold a token, [tokens, …], from [B, K, …]."""
        return tokens.flatten(0, 1) if self.held is None else tokens[self.held]


def neighbours(lengths: Sequence[Sequence[int]], *, rows: int, spare: int | None = None) -> Iterator[Run]:
    """Runs of tokens with ascending prefix lengths, from the last ones on; each is carried over its longest prefix.

    lengths: of each sequence of a group, those with more tokens first. rows: most positions × tokens of a run; a single
    token of each sequence may have more. spare: most positions × tokens that a run may carry in vain, after its shorter
    tokens' own ends; None: only a wide gap, of more than 16 positions and a quarter of the shortest prefix, ends a run.

    >>> [(run.tokens, run.length) for run in neighbours([[10, 11, 12, 40]], rows=1000)]
    [((slice(3, 4, None),), 40), ((slice(0, 3, None),), 12)]
    >>> [(run.tokens, run.length) for run in neighbours([[10, 11], [9]], rows=1000, spare=2)]
    [((slice(1, 2, None), slice(0, 1, None)), 11), ((slice(0, 1, None),), 10)]
    """
    end = 0  # tokens that are dealt with, counted from the last
    while end < len(lengths[0]):
        start, batch = end, sum(len(tokens) > end for tokens in lengths)
        longest, wasted = max(tokens[-1 - start] for tokens in lengths[:batch]), 0
        while end < len(lengths[0]):
            column = [tokens[-1 - end] if len(tokens) > end else 0 for tokens in lengths[:batch]]
            wasted += sum(longest - length for length in column)
            too_far = longest > max(column[0] + 16, column[0] * 5 // 4) if spare is None else wasted > spare
            if end > start and (too_far or longest * batch * (end - start + 1) > rows):
                break
            end += 1
        parts = (slice(max(0, len(tokens) - end), len(tokens) - start) for tokens in lengths[:batch])
        yield Run(tuple(parts), longest)


def group_sequences(
    lengths: Sequence[Sequence[int]], *, rows: int, spare: int | None, most: Callable[[int], int]
) -> list[list[int]]:
    """Indices of sequences that are measured together, in the order that `neighbours` wants; sequences of like length.

    A sequence joins where that makes fewer runs, each of which costs `spare` rows to start; spare None: each is alone.
    lengths: as of `neighbours`, in any order. most: of sequences of this length that may lie in memory together.
    """
    groups: list[list[int]] = []
    cost = 0
    for index in sorted((i for i, tokens in enumerate(lengths) if tokens), key=lambda i: -lengths[i][-1]):
        alone = _cost(lengths, [index], rows, spare)
        if groups and len(groups[-1]) < min(MOST_SEQUENCES, most(lengths[groups[-1][0]][-1])) and spare is not None:
            together = sorted([*groups[-1], index], key=lambda i: (-len(lengths[i]), i))
            joined = _cost(lengths, together, rows, spare)
            if joined <= cost + (1 - WORTHWHILE) * alone:
                groups[-1], cost = together, joined
                continue
        groups.append([index])
        cost = alone
    return groups


def _cost(lengths: Sequence[Sequence[int]], group: list[int], rows: int, spare: int | None) -> int:
    """Positions × tokens of a group's runs, with those that starting them would make up for."""
    return sum(run.rows + (spare or 0) for run in neighbours([lengths[i] for i in group], rows=rows, spare=spare))
