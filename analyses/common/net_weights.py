"""The net weight of a token: what a batch asks of its (context, token) pair, wherever the pair occurs."""

from __future__ import annotations

import numpy as np
import pandas as pd
from jaxtyping import Int
from torch import Tensor

from gradscope.errors import InputError
from gradscope.rollouts import TokenBatch

_ROUNDING = 1e-6


def net_weights(table: pd.DataFrame, batch: TokenBatch) -> pd.Series:
    """Return each token's net weight: Σ weight over all kept tokens of the batch with the same (context, token) pair.

    table: of this batch only, with all its tokens, in any order; the result has its index. A context is all ids before
    the token, including prompt and dropped tokens, and the temperature, on which the gradient depends. Sums within
    rounding of 0 (1e-6 of Σ|weight|) are set to 0, such as those of a group's advantages over a token shared by all
    responses. A NaN weight makes its pair's sum NaN. Raises InputError if the table's tokens are not the batch's.
    """
    pair = _pairs_of_rows(table, batch)
    weight = table["weight"].to_numpy(np.float64)
    net, gross = np.bincount(pair, weight), np.bincount(pair, np.abs(weight))
    net[np.abs(net) <= _ROUNDING * gross] = 0.0
    return pd.Series(net[pair], index=table.index, name="net_weight")


def _pairs_of_rows(table: pd.DataFrame, batch: TokenBatch) -> np.ndarray:
    """Return each row's (context, token) pair's index. Raises InputError unless rows are the batch's tokens."""
    aligned, _ = batch.left_aligned()
    response, position, token_id = (table[c].to_numpy(np.int64) for c in ("response", "position", "token_id"))
    known = (response >= 0) & (response < len(batch))
    column = position + aligned.response_start.numpy()[np.where(known, response, 0)]
    known &= (column >= 0) & (column < aligned.input_ids.shape[1])
    response, column = np.where(known, response, 0), np.where(known, column, 0)
    known &= aligned.response_mask.numpy()[response, column] & (aligned.input_ids.numpy()[response, column] == token_id)
    twice = table.duplicated(["response", "position"]).any()
    if not known.all() or twice or len(table) != batch.num_tokens:
        raise InputError(
            f"the table's {len(table)} rows are not exactly the {batch.num_tokens} tokens of the batch; give the whole "
            "table of only this batch"
        )
    return _pairs(aligned).numpy()[response, column]


def _pairs(aligned: TokenBatch) -> Int[Tensor, "B n"]:
    """Number the distinct (temperature, ids up to the column) of a batch that starts at column 0.

    Column by column, each sequence's number becomes that of its pair (number so far, next id), which is exact since
    nothing is hashed.
    """
    _, node = aligned.temperature.unique(return_inverse=True)
    pairs, used = aligned.input_ids.clone(), 0
    for column, ids in enumerate(aligned.input_ids.T):
        _, token = ids.unique(return_inverse=True)
        _, node = (node * len(ids) + token).unique(return_inverse=True)
        pairs[:, column] = node + used
        used += int(node.max()) + 1
    return pairs
