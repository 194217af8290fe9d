"""One optimizer step, predicted to first order and split by source."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from gradscope.diagnosis.measured import Case, Measured
from gradscope.diagnosis.products import real_step
from gradscope.intervals import assign_intervals
from gradscope.rollouts import TokenBatch, served_prompts
from gradscope.updates import Influence, OptimizerStep, influence_cost

TITLE = "influence between probability intervals"
STAGE = "one predicted step"


@dataclass(frozen=True)
class PredictedStep:
    """The predicted effect of a step on the whole batch or on some of its prompts."""

    influence: Influence
    rows: Int[Tensor, " b"]
    """Responses of the step."""
    slopes: np.ndarray | None
    """`Influence.entropy_slopes` of the whole batch, if the loss has no KL part."""


def asked(m: Measured) -> bool:
    return m.settings.influence_tokens is not None


def passes(case: Case) -> float:
    if case.settings.influence_tokens is None:
        return 0.0
    return influence_cost(case.step, case.settings.loss, num_intervals=len(case.settings.edges) - 1)


def cost(m: Measured) -> float:
    """The price of the longest prompt, any of which may come first: prompts come whole, in random order."""
    least = int(m.table["group"].value_counts().max())
    return m.seconds(passes(m.case)) * min(m.settings.influence_tokens, least) / m.batch.num_tokens


def make(m: Measured) -> PredictedStep | None:
    """Predict the step on as many whole prompts as the time allows, those with an advantage first."""
    if not m.processes.is_main:
        return None
    wanted = m.settings.influence_tokens
    reserved = m.seconds(real_step.passes(m.case))
    left = m.clock.left - (reserved if reserved <= m.clock.left else 0.0)
    budget = wanted if left == inf else min(wanted, int(m.batch.num_tokens * left / m.seconds(passes(m.case))))
    rows = within_budget(m.batch, budget, generator=torch.Generator().manual_seed(m.settings.seed))
    batch = m.batch.select(rows)
    whole = batch.num_tokens == len(m.table)
    if not whole:
        within = f"influence_tokens = {budget:,}" if budget == wanted else "the minutes"
        m.note(
            "influence-sample",
            f"Influence between probability intervals refers to a step on {batch.num_tokens:,} of {len(m.table):,} "
            f"tokens (whole prompts within {within}, those with an advantage first).",
        )
    # The step's intervals are by π_old, its KL part is a separate source, and preferences have two sides instead.
    known = m.table[m.table["old_logprob"].notna()]
    same = assign_intervals(np.exp(known["old_logprob"].clip(upper=0)), m.settings.edges) == known["interval"]
    plain = whole and not m.table["kl_weight"].any()
    shared = "sums" in m.made and plain and same.all() and not m.settings.loss.has_sides
    totals = m.made["sums"].totals if shared else None
    J = m.jacobian.alone().select(rows)
    found = OptimizerStep(J, **m.step_keywords()).predicted(edges=m.settings.edges, gradients=totals)
    return PredictedStep(found, rows, found.entropy_slopes if plain else None)


def within_budget(batch: TokenBatch, tokens: int, *, generator: torch.Generator) -> Int[Tensor, " b"]:
    """Return the rows of whole prompts in random order, up to this many tokens; at least one prompt.

    Prompts with an advantage come first: a step on the others would show only momentum and decay.
    """
    prompts = batch.group_ids[batch.response_mask.any(1)].unique()
    prompts = prompts[torch.randperm(len(prompts), generator=generator)]
    served = served_prompts(batch)
    prompts = torch.cat([prompts[torch.isin(prompts, served)], prompts[~torch.isin(prompts, served)]])
    counts = torch.stack([batch.response_mask[batch.group_ids == prompt].sum() for prompt in prompts])
    taken = max(1, int((counts.cumsum(0) <= min(tokens, int(counts.sum()))).sum()))  # allow numbers beyond 64 bits
    return torch.isin(batch.group_ids, prompts[:taken]).nonzero()[:, 0]
