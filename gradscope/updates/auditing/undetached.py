"""Weights of a loss of which a factor that should be constant has a gradient, too.

The gradient of −Σ_s v_s·f_s, of which only v_s is meant to have one, has the factor f_t·v_t' + Σ_s v_s·∂f_s/∂log π_t on
∇ log π_t: v is log π, or the clipped surrogate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from gradscope.objective import fill_unknown
from gradscope.updates.auditing.faults import Columns

STEP = 1e-5
"""Of log π in float64, for central differences."""
CAPS = (1.0, 1.5, 2.0, 3.0, 5.0, 10.0)
"""Where trainers cut a correction for the sampler."""
LONGEST = 512
"""Most tokens of a response in weights of which each depends on all of its log π, which are moved one by one."""


def undetached(columns: Columns, entropy: Float[Tensor, "B S"]) -> Iterator[Float[Tensor, "B S"]]:
    """Yield the policy's weights where w has a gradient in w·log π, or where a factor of π on the clipped surrogate, or
    on Â·log π, has one, or the correction for the sampler, π over its probability below a cap."""
    logprob, weighting = columns.logprob.double(), columns.loss.weighed
    if weighting is not None and weighting.DENOMINATOR != "tokens":  # of margins, whose gradient is all meant
        return

    def weigh(own: Columns) -> Callable[[Tensor], Tensor]:
        return lambda values: own.weigh(entropy, values).policy

    slope = _slope(weigh(columns), logprob, logprob, columns.kept)
    if slope is not None and slope.any():
        yield weigh(columns)(logprob) + slope
    if columns.batch.advantages is None:
        return
    # Of π instead of π_old, at a ratio of 1: the factor, times Â.
    own = weigh(replace(columns, batch=replace(columns.batch, old_logprobs=None)))
    old, loss = fill_unknown(columns.batch.old_logprobs, columns.logprob).double(), columns.loss
    ratio, positive = (logprob - old).exp(), columns.batch.advantages > 0
    cut = torch.where(positive, ratio.clamp(max=1 + loss.clip_ratio_high), ratio.clamp(min=1 - loss.clip_ratio_low))
    for live, value in ((ratio * (cut == ratio), cut), (torch.ones_like(ratio), logprob)):
        slope = _slope(own, logprob, value, columns.kept)
        if slope is not None and slope.any():
            yield own(logprob) * live + slope
    if (sampler := columns.batch.sampler_logprobs) is not None:
        correction = (logprob - fill_unknown(sampler, columns.logprob)).exp()
        for cap in CAPS:
            below = columns.kept & (correction < cap)
            if 0 < below.sum() < columns.kept.sum():
                yield own(logprob) * (ratio * (cut == ratio) + cut * below)


def _slope(
    weigh: Callable[[Tensor], Tensor], at: Float[Tensor, "B S"], values: Float[Tensor, "B S"], kept: Tensor
) -> Float[Tensor, "B S"] | None:
    """Return Σ_s values_s·∂w_s/∂log π_t, over the tokens s of t's response; None: these are too many."""
    place = kept.cumsum(1) - 1

    def move(tokens: Tensor) -> Tensor:
        return (weigh(at + STEP * tokens) - weigh(at - STEP * tokens)) / (2 * STEP)

    if not move(kept & (place % 2 == 0))[kept & (place % 2 == 1)].any():
        return torch.where(kept, values * move(kept), 0.0)
    if place.max() >= LONGEST:
        return None
    found = torch.zeros_like(at)
    for one in range(int(place.max()) + 1):
        tokens = kept & (place == one)
        found += tokens * torch.where(kept, values * move(tokens), 0.0).sum(1, keepdim=True)
    return found
