"""What the parts of a diagnosis take, in forward passes over the batch, and which of them fit into some minutes."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from time import monotonic

from gradscope.diagnosis.result import LARGE, DiagnosisSettings
from gradscope.gradients import BACKWARD, FORWARD_MODE, Stopwatch
from gradscope.objective import COMPARED, PAPER, LossSettings
from gradscope.policy import Policy
from gradscope.updates import StepSettings

TOKENS, SUMS, STEPS, COMPARISON = "tokens", "summed gradients", "one optimizer step", "comparing token weightings"
STAGES = {"actual_step": STEPS, "influence": STEPS, "comparison": COMPARISON}
"""Part → stage of a run; the others are of the summed gradients."""


@dataclass(frozen=True)
class Minutes:
    """A budget for gradients and steps, by the wall clock; costs are in forward passes over the batch."""

    limit: int | float | None
    """None: no limit."""
    pass_seconds: float = 0.0
    """Seconds of a forward pass, where there is a limit to keep to."""
    watch: Stopwatch = field(default_factory=Stopwatch)
    """Counts since the diagnosis began."""

    @property
    def left(self) -> float:
        """Forward passes that still fit."""
        if self.limit is None:
            return inf
        return max(0.0, 60 * self.limit - self.watch.seconds()) / max(self.pass_seconds, 1e-9)

    @property
    def deadline(self) -> float | None:
        """The minutes' end on the clock of `time.monotonic`; None: there is none."""
        return None if self.limit is None else monotonic() + 60 * self.limit - self.watch.seconds()

    def fit_influence(self, cost: float, wanted: int, *, tokens: int, least: float) -> int | None:
        """Return tokens of the step whose movement is split by source, fewer than wanted where that on all takes too
        long.

        cost: forward passes for all tokens. least: tokens of a prompt, for whole ones are taken; None: not even one
        fits.
        """
        budget = wanted if self.left == inf else min(wanted, int(tokens * self.left / cost))
        return None if budget < min(wanted, least) else budget


def update_cost(num_passes: int = 1) -> float:
    """Return the forward passes that `apply_update` with so many optimizer steps takes."""
    return 2 + (1 + BACKWARD) * num_passes


def influence_cost(step: StepSettings, loss: LossSettings = PAPER, *, num_intervals: int = 4) -> float:
    """Return the forward passes that `influence` takes."""
    gradients = num_intervals + bool(loss.kl_coef)
    derivatives = gradients + (step.optimizer == "adamw") + bool(step.weight_decay)
    return 3 + BACKWARD * (gradients + 1) + FORWARD_MODE * (derivatives + 1)  # one more for the entropy


def compare_cost(rows: int = len(COMPARED) + 2, *, metric: bool, take_steps: bool = False) -> float:
    """Return the most forward passes that `compare` takes for this many rows of weights, two for a weighting of two
    steps; by default for the weightings that it compares where none are named. metric: whether AdamW's is known.
    """
    gains = rows * (update_cost() + FORWARD_MODE) + 3 * update_cost(2)
    real = (rows + 1) * update_cost() * take_steps
    entropy = BACKWARD + FORWARD_MODE
    return 1 + rows * (BACKWARD + FORWARD_MODE * (1 + metric)) + entropy + (gains if metric else 0) + real


def part_costs(
    policy: Policy, settings: DiagnosisSettings, step: StepSettings, *, sums: float, metric: bool
) -> dict[str, float]:
    """Return what is made of rollouts with weights → forward passes over the batch that take as long, in the order of a
    run.

    Keys are `SUMS`, of the plain ones, and those of `PARTS`. policy: it may be without weights. sums: of the summed
    gradients once, as planned. metric: AdamW's is known, and the table's norms are in it.
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
