"""Log-probabilities of a log that cannot be the tokens': missing ones that stand there as 0.0, or another token's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from gradscope.errors import InputError

LIKELY = 0.9
"""Tokens above this probability may well have a log π that rounds to 0."""
MOST = 0.9
"""Share of the less likely tokens with 0.0 from which on the log holds none."""
FEWEST = 20
"""Tokens below which nothing is concluded."""
APART = 0.5
"""Mean distance in nats from which on another alignment is looked for."""
NEARER = 4.0
"""How many times nearer the log has to be to its neighbours' log π than to the tokens' own."""


def refuse_foreign_logprobs(
    own: Sequence[Float[Tensor, " _"]], logged: Sequence[Float[Tensor, " _"]], name: str
) -> None:
    """InputError where logged log π are 0.0 at most tokens that are not likely, or those of the token beside.

    own: the policy's log π by response, nats; logged: what the log says of the same tokens, NaN where it says nothing.
    """
    mine, told = (torch.cat(list(values)).double().numpy() for values in (own, logged))
    unlikely = ~np.isnan(told) & (mine < np.log(LIKELY))
    zero = int((told[unlikely] == 0).sum())
    if unlikely.sum() >= FEWEST and zero > MOST * unlikely.sum():
        raise InputError(
            f"{name} is 0.0, a probability of 1, at {zero} of the {int(unlikely.sum())} tokens that the policy gives "
            f"less than {LIKELY}: the log holds none; drop the column (tokens are then on-policy), or log them"
        )
    apart = _distance(own, logged, 0)
    if not apart > APART:
        return
    for shift, words in ((1, "next"), (-1, "previous")):
        if NEARER * (other := _distance(own, logged, shift)) < apart:
            raise InputError(
                f"{name} is that of the {words} token: {other:.2f} nats from its log π in the mean, and {apart:.2f} "
                "from the token's own; shift the column by one"
            )


def _distance(own: Sequence[Tensor], logged: Sequence[Tensor], shift: int) -> float:
    """Mean distance of each token's logged log π from the own one so many places on; NaN of too few."""
    parts = []
    for mine, told in zip(own, logged, strict=True):
        first, second = (mine[shift:], told[: len(told) - shift]) if shift >= 0 else (mine[:shift], told[-shift:])
        parts.append((first - second).abs())
    distances = torch.cat(parts).double()
    distances = distances[distances.isfinite()]
    return float(distances.mean()) if len(distances) >= FEWEST else float("nan")
