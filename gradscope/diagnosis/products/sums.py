"""The intervals' summed gradients prompt by prompt, as inner products; plain and in AdamW's metric."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float

from gradscope.diagnosis.measured import Case, Measured
from gradscope.diagnosis.update import seeds_of
from gradscope.gradients import Gram, largest_share

TITLE = "the summed gradient, even of a single prompt"
STAGE = "summed gradients"
ADAMW_TITLE = "the AdamW-preconditioned summed gradient"


@dataclass(frozen=True)
class Sums:
    """Summed gradients of the loss over each prompt's tokens of each interval."""

    grams: Mapping[str, Gram]
    """By metric: raw, adamw."""
    tokens: Float[np.ndarray, "n A"]
    """Number of tokens by prompt and interval."""
    totals: torch.Tensor | None
    """[A, P], the summed gradient of each interval's tokens over all prompts, if in memory."""

    @property
    def raw(self) -> Gram:
        return self.grams["raw"]


def asked(m: Measured) -> bool:
    return True


def passes(case: Case) -> float:
    return case.sums * (1 + case.metric)


def cost(m: Measured) -> float:
    """The price of half a prompt: one starts if half of it fits."""
    return m.seconds(m.case.sums / len(m.jacobian.prompts)) / 2


def make(m: Measured) -> Sums:
    """Sum the gradients of as many prompts as the time and the memory allow, in random order."""
    size, metric, J, way = len(m.labels), m.metric, m.jacobian, m.settings.gradient_way
    weights = J.kept(seeds_of(m.table, m.batch, size))
    plan = J.plan_gram(size, metric=metric is not None, way=way)
    if metric is not None:
        once = plan.forward_passes * largest_share(len(J.prompts), m.processes.count)
        price = m.seconds((1 + (plan.way != "whole")) * once)
        metric = metric if m.fits("adamw_sums", ADAMW_TITLE, price) else None
    found = J.until(m.clock.deadline).gram(weights, metric=metric, way=way)
    if metric is not None and found.scaled is None:
        m.fits("adamw_sums", ADAMW_TITLE, price)
    if len(found.groups) < len(J.prompts):
        full = len(found.groups) == found.plan.groups
        limit = "do not fit into --gradient-memory" if full else "would have taken longer than the minutes"
        of = f"{len(found.groups):,} of the {len(J.prompts):,} prompts"
        m.note("fewer-sums", f"Summed gradients are of {of}, drawn at random: more {limit}.")
    if found.plan.way != "whole":
        m.note("inexact", f"{str(found.plan).capitalize()}.")
    by_prompt = m.table.groupby("group")["interval"].value_counts().unstack(fill_value=0)
    tokens = by_prompt.reindex(found.groups, columns=range(size), fill_value=0).to_numpy(np.float64)
    grams = {name: own for name, own in (("raw", found), ("adamw", found.scaled)) if own is not None}
    partial = found.totals is None or len(found.groups) < len(J.prompts)
    return Sums(grams, tokens, None if partial else found.totals.rows)
