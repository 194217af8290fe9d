"""A row of the table: one step of a trainer, the documented gradient, and the one that was found."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from gradscope.objective import LossSettings
from gradscope.policy import Policy
from gradscope.rollouts import TokenBatch
from gradscope.updates import Audit, audit

COLUMNS = (
    *("trainer", "version", "case", "documented", "agrees", "reading", "factor", "cause", "fault", "distance"),
    *("responses", "tokens", "seconds", "reason"),
)


@dataclass(frozen=True)
class Step:
    """One real step of a trainer, and what its documentation says of it."""

    policy: Policy
    """The weights before the step."""
    batch: TokenBatch
    """All responses of the step, without scales of the loss."""
    gradient: Mapping[str, Tensor]
    loss: LossSettings
    """The documented loss at a token."""
    micro_batch: int | None
    divisors: Tensor | None
    """What the documentation divides each response's terms by [B]; None: it does not say."""
    fault: str | None = None
    """The audit's name for what is documented and what `loss` cannot say; None: it says it all."""
    processes: int = 1


def judge(step: Step) -> dict[str, Any]:
    """Return the columns of a step: whether its gradient is the documented one, and which reading it is."""
    told, batch = None, step.batch
    if step.divisors is not None:
        told = _audit(step, replace(batch, loss_scales=batch.num_tokens / step.divisors.float()))
    found = _audit(step, batch)
    right = told is not None and told.kind in ("same", "rounding") and told.fault == step.fault
    agrees = "not said" if told is None else "yes" if right else "no"
    shown = found.readings.set_index("reading").loc[found.reading]
    shown = shown.iloc[0] if shown.ndim > 1 else shown
    return {
        **{"agrees": agrees, "reading": found.aggregation if found.kind != "other" else "none"},
        **{"factor": f"{found.factor:.4g}", "cause": found.cause or "", "fault": found.fault or ""},
        **{"distance": f"{shown['distance']:.1e}", "responses": str(len(batch)), "tokens": str(batch.num_tokens)},
        "reason": found.verdict.split(". ")[0] if agrees == "no" else "",
    }


def _audit(step: Step, batch: TokenBatch) -> Audit:
    parts = {"micro_batch": step.micro_batch, "processes": step.processes}
    return audit(step.policy, batch, step.gradient, loss=step.loss, **parts)


def cover_pairs(
    levels: Mapping[str, Sequence[Any]], allowed: Callable[[Mapping[str, Any]], bool]
) -> list[dict[str, Any]]:
    """Return few cases in which every two levels of different factors meet, where a case that is allowed has both.

    Greedy: of all cases, the one with the most pairs that are still missing; ties at random, with one seed.
    """
    cases = [dict(zip(levels, case, strict=True)) for case in itertools.product(*levels.values())]
    cases = [case for case in cases if allowed(case)]
    random.Random(0).shuffle(cases)
    pairs = [{*itertools.combinations(case.items(), 2)} for case in cases]
    missing, chosen = set().union(*pairs), []
    while missing:
        best = max(range(len(cases)), key=lambda number: len(pairs[number] & missing))
        chosen.append(cases[best])
        missing -= pairs[best]
    return chosen
