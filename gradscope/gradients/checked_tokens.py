"""Tokens for the self-check: some of every interval, at random or, for a large policy, the cheapest."""

from __future__ import annotations

import numpy as np

CHECKED_EACH = 2
"""Most tokens per interval that the self-check recomputes."""
LIGHT = 2e11
"""FLOPs allowed for the drawn tokens' plain backward passes, about 3 s on one core; beyond, the check is cheaper."""


def choose_checked(
    intervals: np.ndarray, rows: np.ndarray, prefixes: np.ndarray, generator: np.random.Generator, *, parameters: int
) -> np.ndarray:
    """Return the mask of CHECKED_EACH random tokens per interval, or of cheaper ones (see `lighten_check`)."""
    chosen = np.zeros(len(intervals), dtype=bool)
    for interval in np.unique(intervals):
        members = (intervals == interval).nonzero()[0]
        chosen[generator.choice(members, min(CHECKED_EACH, len(members)), replace=False)] = True
    return lighten_check(chosen, intervals, rows, prefixes, parameters=parameters)


def lighten_check(
    drawn: np.ndarray, intervals: np.ndarray, rows: np.ndarray, prefixes: np.ndarray, *, parameters: int
) -> np.ndarray:
    """Return the drawn tokens if checking them is cheap, else one per non-empty interval, chosen from few responses
    (which share a forward pass) and with short prefixes.

    All arrays are per token [n]: whether it was drawn, its interval of π, its response, the length of its prefix.
    """
    if 6 * parameters * int(prefixes[drawn].sum()) <= LIGHT:  # forward 2, backward 4 for each parameter and position
        return drawn
    chosen, left = np.zeros_like(drawn), set(np.unique(intervals).tolist())
    while left:
        # The first token of each response and remaining interval.
        wanted = np.flatnonzero(np.isin(intervals, list(left)))
        order = wanted[np.lexsort((prefixes[wanted], intervals[wanted], rows[wanted]))]
        first = order[np.unique(np.stack([rows[order], intervals[order]]), axis=1, return_index=True)[1]]
        found, start, count = np.unique(rows[first], return_index=True, return_counts=True)
        longest = np.maximum.reduceat(prefixes[first], start)
        best = np.lexsort((longest, -count))[0]
        picks = first[rows[first] == found[best]]
        chosen[picks] = True
        left -= set(intervals[picks].tolist())
    return chosen
