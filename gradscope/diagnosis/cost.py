"""What the parts of a diagnosis cost."""

from __future__ import annotations

from gradscope.diagnosis.result import LARGE, DiagnosisSettings
from gradscope.policy import Policy
from gradscope.updates import (
    KINDS,
    StepSettings,
    compare_cost,
    fits_at_once,
    influence_cost,
    linearise_cost,
    update_cost,
)

TOKENS, SUMS, STEPS, SCREENING, COMPARISON = (
    *("tokens", "summed gradients", "one optimizer step"),
    *("screening α and η", "comparing token weightings"),
)


def part_costs(
    policy: Policy, settings: DiagnosisSettings, step: StepSettings, *, sums: float, memory: int, metric: bool
) -> dict[str, float]:
    """Part → forward passes over the batch that take as long, of the parts that are made where rollouts have weights.

    policy: it may be without weights. sums: of the summed gradients, as planned. metric: AdamW's is known.
    """
    s, intervals = settings, len(settings.edges) - 1
    size = sum(parameter.numel() for parameter in policy.model.parameters())
    costs, small = {TOKENS: 1.0, SUMS: sums * (1 + metric)}, size < LARGE
    steps = update_cost() if s.actual_step else 0.0
    if s.influence_tokens is not None:
        alone = not fits_at_once(policy, step, intervals, memory)
        steps += influence_cost(step, s.loss, num_intervals=intervals, one_by_one=alone)
    costs[STEPS] = steps
    if s.recommend_batches is not None and (small if s.recommend is None else s.recommend):
        alone = not fits_at_once(policy, step, KINDS * 2 * intervals, memory)
        costs[SCREENING] = screening_cost(s, step, one_by_one=alone)
    if small if s.compare is None else s.compare:
        costs[COMPARISON] = compare_cost(metric=metric)
    return {part: cost for part, cost in costs.items() if cost}


def screening_cost(settings: DiagnosisSettings, step: StepSettings, *, one_by_one: bool) -> float:
    """Forward passes over the batch that the screening of α and η takes."""
    etas = {eta for eta in settings.etas if eta is not None}
    cells = len({*settings.edges, *etas}) - 1  # intervals, each cut at every η
    return linearise_cost(cells, len(etas) + 1, step, settings.loss, one_by_one=one_by_one)
