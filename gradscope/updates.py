"""What a real update did to every token: whose probability moved the way its advantage asks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from gradscope.batch import TokenBatch
from gradscope.errors import InputError
from gradscope.intervals import EDGES, assign_intervals, interval_labels
from gradscope.logprobs import TokenStatistics


def right_direction_shares(
    before: TokenStatistics, after: TokenStatistics, batch: TokenBatch, *, edges: Sequence[float] = EDGES
) -> pd.DataFrame:
    """Of the tokens with Â > 0, the share whose probability rose; of those with Â < 0, the share whose fell (Fig. 3).

    before, after: statistics [B, S] of the batch's tokens; the interval is that of the probability before. A token's
    movement is judged by log π − log(1−π), which still moves where π has rounded to 1. A row per interval and sign:
    interval, label, sign ("positive", "negative"); num_tokens: with that sign; tied: not moved at all; share: moved the
    right way, of those that moved; NaN where none did. Raises InputError for a batch without advantages.
    """
    if batch.advantages is None:
        raise InputError("the batch has no advantages, so no direction is right; resolve them first")
    keep = batch.response_mask
    advantages = batch.advantages[keep].numpy()
    prob = before.logprob[keep].double().exp().clamp(max=1.0).numpy()
    intervals = assign_intervals(prob, edges)
    # Both parts compared by themselves: either may be −inf on both sides, whose difference would be NaN.
    rise = np.sign((after.logprob - before.logprob)[keep].nan_to_num(0.0).numpy())
    fall = np.sign((after.log_one_minus_prob - before.log_one_minus_prob)[keep].nan_to_num(0.0).numpy())
    moved = np.where(rise != 0, rise, -fall)
    rows = []
    for interval, label in enumerate(interval_labels(edges)):
        for name, sign in (("positive", 1), ("negative", -1)):
            which = (intervals == interval) & (np.sign(advantages) == sign)
            right, tied = int((moved[which] == sign).sum()), int((moved[which] == 0).sum())
            total = int(which.sum())
            share = right / (total - tied) if total > tied else float("nan")
            rows.append((interval, label, name, total, tied, share))
    return pd.DataFrame(rows, columns=["interval", "label", "sign", "num_tokens", "tied", "share"])
