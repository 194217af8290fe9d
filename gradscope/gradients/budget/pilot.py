"""A short pilot on the real policy: the time that scoring, measuring and summing a prompt take on this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from gradscope.gradients.budget.shared_minutes import Prices
from gradscope.gradients.engine.grouping import POSITION_COST
from gradscope.gradients.statistics import BatchStatistics, find_statistics
from gradscope.objective import LossSettings
from gradscope.runs import ALONE, SILENT

if TYPE_CHECKING:
    from gradscope.gradients.operator.gram import SumsPlan
    from gradscope.gradients.operator.jacobian import TokenJacobian

TOKENS = 4
"""Tokens with a backward pass."""
BY_ITSELF, TOGETHER = 4.0, 1.2
"""Forward passes over its response that measuring one token takes at a glance, by itself and with all others of the
response. SmolLM2-135M-Instruct takes 0.95 together, with responses of 16 tokens after prompts of 100."""


@dataclass(frozen=True)
class Pilot:
    """The pilot's responses, and the prices found."""

    J: TokenJacobian
    """The Jacobian of the first prompt's responses."""
    statistics: BatchStatistics
    prices: Prices


def glance(
    J: TokenJacobian, edges: Sequence[float], follows: SumsPlan | None, *, passes: float | None = None
) -> Prices:
    """Estimate the prices within seconds, from two forward passes over a response of median length.

    The first pass includes one-off preparations. Arguments as in `run_pilot`.
    """
    lengths, kept = J.batch.attention_mask.sum(1), J.batch.response_mask.any(1)
    rows = kept.nonzero()[:, 0]
    quiet = J.within(replace(J.resources, progress=SILENT))
    one = quiet.select(rows[lengths[rows].argsort()[[len(rows) // 2]]])
    (_, first), (_, second) = (_time(lambda: one.moved().statistics) for _ in range(2))
    position = min(first, second) / float(one.batch.attention_mask.sum())
    prompt = position * float(lengths[kept].sum()) / len(J.prompts)
    token = position * float(lengths[kept].double().mean())
    after = 0.0 if follows is None else max(follows.forward_passes, passes or 0.0)
    joint = TOGETHER * token * J.num_tokens / len(J.prompts)
    return Prices(prompt, (len(edges) - 1) * BY_ITSELF * token, after * prompt, joint)


def run_pilot(
    J: TokenJacobian,
    order: Int[Tensor, " n"],
    loss: LossSettings,
    edges: Sequence[float],
    follows: SumsPlan | None,
    *,
    passes: float | None = None,
) -> Pilot:
    """Score the first prompt's responses, measure a few of their tokens, and sum the gradients of three responses.

    Args:
        order: the prompts, in the order in which they will be used.
        follows: how gradients will be summed; None: not at all.
        passes: forward passes of everything that follows the table; None: only the sums.
    """
    lengths, kept = J.batch.attention_mask.sum(1), J.batch.response_mask.any(1)
    first = (kept & (J.batch.group_ids == order[0])).nonzero()[:, 0]
    a_prompt = float(lengths[kept].sum()) / len(order)
    few = J.select(first)
    known, scoring = _time(lambda: find_statistics(few.meter, few.batch, loss, edges=edges, processes=ALONE))
    scoring /= float(lengths[first].sum())
    picked = np.zeros(few.num_tokens, dtype=bool)
    picked[np.linspace(0, few.num_tokens - 1, min(TOKENS, few.num_tokens)).astype(int)] = True
    _, measuring = _time(lambda: [*few.row_norms(torch.from_numpy(picked))])
    ends = [J.batch.sequence(row)[1] for row in kept.nonzero()[:, 0].tolist()]
    reach = np.mean([int(own[-1]) for own in ends])
    # In a small sample each token has its own response, and needs a forward pass over it.
    one = float(torch.cat(ends).double().mean()) + POSITION_COST * reach
    rate = measuring / known.backward_cost(picked)
    measuring = (len(edges) - 1) * one * rate
    joint = rate * sum(float(own.sum()) + POSITION_COST * int(own[-1]) for own in ends) / len(order)
    summing = 0.0
    if follows is not None:
        more = 0.0 if passes is None else max(0.0, passes - follows.forward_passes)
        summing = _time_sums(J, order, follows, scoring) + more * scoring * a_prompt
    return Pilot(few, known, Prices(scoring * a_prompt, measuring, summing, joint))


def _time_sums(J: TokenJacobian, order: Int[Tensor, " n"], follows: SumsPlan, scoring: float) -> float:
    """Return the seconds of a prompt's summed gradients; scoring: seconds per position of a forward pass."""
    lengths, kept = J.batch.attention_mask.sum(1), J.batch.response_mask.any(1)
    rows = [int((kept & (J.batch.group_ids == prompt)).nonzero()[0]) for prompt in order[:2]]
    seconds = [_time(lambda count=count: _sum(J.select(rows[:count]), follows))[1] for count in (1, len(rows))]
    # The first one includes one-off preparations.
    last, positions = rows[-1], float(lengths[kept].sum()) / len(order)
    took = seconds[1] - seconds[0] if len(rows) > 1 and seconds[1] > seconds[0] else seconds[1] / len(rows)
    passes = follows.forward_passes * scoring * float(lengths[last])
    return max(0.0, took - passes) + min(1.0, took / passes) * follows.forward_passes * scoring * positions


def _sum(J: TokenJacobian, follows: SumsPlan) -> None:
    """Sum gradients by prompt, for as many rows of weights as `follows` has, on disjoint tokens."""
    weights = torch.zeros(follows.rows, J.num_tokens)
    weights[torch.arange(J.num_tokens) % follows.rows, torch.arange(J.num_tokens)] = 1.0
    J.gram(weights, way=follows.way)


def _time(make: Callable[[], object]) -> tuple[object, float]:
    start = perf_counter()
    made = make()
    return made, perf_counter() - start
