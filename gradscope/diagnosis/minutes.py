"""Estimate the cost of a diagnosis's parts in forward passes over the batch, and fit them into a time limit."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from time import monotonic

from gradscope.diagnosis.result import LARGE, DiagnosisSettings
from gradscope.gradients import BACKWARD, FORWARD_MODE, Stopwatch
from gradscope.objective import COMPARED, PAPER, LossSettings
from gradscope.policy import Policy
from gradscope.updates import StepSettings, gains_cost, update_cost

TOKENS, SUMS, STEPS, COMPARISON = "tokens", "summed gradients", "one optimizer step", "comparing token weightings"
STAGES = {"actual_step": STEPS, "influence": STEPS, "comparison": COMPARISON}
"""Part → stage of a run; all other parts belong to the summed gradients."""


@dataclass(frozen=True)
class Minutes:
    """Wall-clock budget for gradients and steps; costs are in forward passes over the batch."""

    limit: int | float | None
    """None: no limit."""
    pass_seconds: float = 0.0
    """Seconds per forward pass; needed only with a limit."""
    watch: Stopwatch = field(default_factory=Stopwatch)
    """Started when the diagnosis began."""

    @property
    def left(self) -> float:
        """Number of forward passes that still fit."""
        if self.limit is None:
            return inf
        return max(0.0, 60 * self.limit - self.watch.seconds()) / max(self.pass_seconds, 1e-9)

    @property
    def deadline(self) -> float | None:
        """End of the budget on the clock of `time.monotonic`; None without a limit."""
        return None if self.limit is None else monotonic() + 60 * self.limit - self.watch.seconds()

    def fit_influence(self, cost: float, wanted: int, *, tokens: int, least: float) -> int | None:
        """Return for how many tokens the step's movement can be split by source, at most `wanted`; None if for none.

        cost: forward passes for all tokens. least: tokens of a prompt, since whole prompts are taken.
        """
        budget = wanted if self.left == inf else min(wanted, int(tokens * self.left / cost))
        return None if budget < min(wanted, least) else budget


def influence_cost(step: StepSettings, loss: LossSettings = PAPER, *, num_intervals: int = 4) -> float:
    """Return the forward passes that `influence` takes."""
    gradients = num_intervals + bool(loss.kl_coef)
    derivatives = gradients + (step.optimizer == "adamw") + (step.weight_decay != 0)
    return 3 + BACKWARD * (gradients + 1) + FORWARD_MODE * (derivatives + 1)  # one more for the entropy


def compare_cost(rows: int = len(COMPARED) + 2, *, metric: bool, take_steps: bool = False) -> float:
    """Return an upper bound on the forward passes of `compare`.

    rows: of weights, two for a weighting of two steps; by default those of the weightings compared by default. metric:
    whether AdamW's is known.
    """
    real = (rows + 1) * update_cost() * take_steps
    entropy = BACKWARD + FORWARD_MODE
    return 1 + rows * (BACKWARD + FORWARD_MODE * (1 + metric)) + entropy + (gains_cost(rows) if metric else 0) + real


def part_costs(
    policy: Policy, settings: DiagnosisSettings, step: StepSettings, *, sums: float, metric: bool
) -> dict[str, float]:
    """Return the cost of each part of a diagnosis with weights, in forward passes over the batch, in order of a run.

    Keys are `SUMS`, for the plain sums, and those of `PARTS`. policy: may be without weights. sums: planned cost of the
    summed gradients, once. metric: whether AdamW's is known, and the table's norms are in it.
    """
    s, intervals = settings, len(settings.edges) - 1
    size = sum(parameter.numel() for parameter in policy.model.parameters())
    costs, small = {SUMS: sums, "adamw_sums": sums * metric}, size < LARGE
    costs["actual_step"] = update_cost() if s.actual_step else 0.0
    if s.influence_tokens is not None:
        costs["influence"] = influence_cost(step, s.loss, num_intervals=intervals)
    if small if s.compare is None else s.compare:
        costs["comparison"] = compare_cost(metric=metric)
    return {part: cost for part, cost in costs.items() if cost}


def stage_costs(parts: dict[str, float]) -> dict[str, float]:
    """Sum `part_costs` by stage of a run."""
    stages = dict.fromkeys((TOKENS, SUMS, STEPS, COMPARISON), 0.0) | {TOKENS: 1.0}
    for part, cost in parts.items():
        stages[STAGES.get(part, SUMS)] += cost
    return {stage: cost for stage, cost in stages.items() if cost}
