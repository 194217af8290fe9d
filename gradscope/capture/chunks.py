"""Which tokens are measured together: neighbours, over the prefix of the last of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def neighbours(lengths: Sequence[int], *, rows: int, spare: int | None = None) -> Iterator[slice]:
    """Runs of tokens with ascending prefix lengths, each run carried over its longest prefix.

    rows: most positions × tokens of a run; a single token may have more. spare: most positions × tokens that a run may
    carry in vain, after its shorter tokens' own ends; None: only a wide gap, of more than 16 positions and a quarter of
    the first prefix, ends a run.

    >>> list(neighbours([10, 11, 12, 40], rows=1000))
    [slice(0, 3, None), slice(3, 4, None)]
    >>> list(neighbours([10, 11, 12, 13], rows=1000, spare=1))
    [slice(0, 2, None), slice(2, 4, None)]
    """
    start, wasted = 0, 0
    for i, length in enumerate(lengths):
        if i == start:
            continue
        gap, tokens = length - lengths[i - 1], i - start
        if spare is None:
            too_far = length > max(lengths[start] + 16, lengths[start] * 5 // 4)
        else:
            too_far = wasted + gap * tokens > spare
        if too_far or length * (tokens + 1) > rows:
            yield slice(start, i)
            start, wasted = i, 0
        else:
            wasted += gap * tokens
    if lengths:
        yield slice(start, len(lengths))
