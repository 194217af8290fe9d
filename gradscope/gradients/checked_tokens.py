"""Which tokens the self-check takes: some of every interval, as they were drawn or, of a large policy, the cheapest."""

from __future__ import annotations

import numpy as np

CHECKED_EACH = 2
"""Tokens of each interval, at most, that the self-check recomputes."""
LIGHT = 2e11
"""FLOPs that plain backward passes of the tokens as drawn may take, some 3 s of a processor's core; beyond, the check
is lightened."""


def choose_checked(
    intervals: np.ndarray, rows: np.ndarray, prefixes: np.ndarray, generator: np.random.Generator, *, parameters: int
) -> np.ndarray:
    """Return the mask of CHECKED_EACH random tokens of each interval (all of one with fewer), lightened if dear.

    parameters: number of the policy's parameters; see `lighten_check`.
    """
    chosen = np.zeros(len(intervals), dtype=bool)
    for interval in np.unique(intervals):
        members = (intervals == interval).nonzero()[0]
        chosen[generator.choice(members, min(CHECKED_EACH, len(members)), replace=False)] = True
    return lighten_check(chosen, intervals, rows, prefixes, parameters=parameters)


def lighten_check(
    drawn: np.ndarray, intervals: np.ndarray, rows: np.ndarray, prefixes: np.ndarray, *, parameters: int
) -> np.ndarray:
    """Return the drawn tokens if checking them is cheap, else one of each non-empty interval, of few
    responses and with short prefixes, as tokens of one response share a forward pass.

    All arrays are by token [n]: True for those drawn; the interval of π; the response; the length of the prefix.
    """
    if 6 * parameters * int(prefixes[drawn].sum()) <= LIGHT:  # forward 2, backward 4 for each parameter and position
        return drawn
    chosen, left = np.zeros_like(drawn), set(np.unique(intervals).tolist())
    while left:
        # Of each response and interval, the first token; intervals that were dealt with do not count any more.
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
