"""The effect of an optimizer step on every token: movements, directions, influence, and comparison of weightings."""

from gradscope.updates.apply_update import OptimizerStep, apply_update, apply_updates, update_cost
from gradscope.updates.audit import Audit, audit, gradient_of_moments, undo_clip
from gradscope.updates.comparison.compare import (
    Comparison,
    ComparisonChoices,
    ComparisonSettings,
    compare,
    compare_cost,
    compare_rows,
    distinct_rows,
)
from gradscope.updates.comparison.describe import (
    ONE_BATCH,
    WHAT_STAYS,
    describe,
    gain_sentence,
    signal_sentence,
    weighting_sentences,
)
from gradscope.updates.comparison.real_steps import gains_cost
from gradscope.updates.directions import (
    SIGNS,
    batch_direction_shares,
    log_odds_change,
    movement_summary,
    over_batches,
    right_direction_shares,
    similarity,
    without_extremes,
)
from gradscope.updates.influence import (
    BY,
    Influence,
    influence,
    influence_cost,
    influence_table,
    moved_against,
)
from gradscope.updates.make_update import UPDATES, Update, make_update, old_intervals
from gradscope.updates.measured_steps import measure_steps
from gradscope.updates.movement import movement_table
from gradscope.updates.spike import Spike, SpikedStep, explain_spike, tabulate_step
from gradscope.updates.step_settings import SGD, StepSettings, read_moments, settle_step, state_step

__all__ = [
    "BY", "ONE_BATCH", "SGD", "SIGNS", "UPDATES", "WHAT_STAYS", "Audit", "Comparison", "ComparisonChoices",
    "ComparisonSettings", "Influence", "OptimizerStep", "Spike", "SpikedStep", "StepSettings", "Update", "apply_update",
    "apply_updates", "audit", "batch_direction_shares", "compare", "compare_cost", "compare_rows", "describe",
    "distinct_rows", "explain_spike", "gain_sentence", "gains_cost", "gradient_of_moments", "influence",
    "influence_cost", "influence_table", "log_odds_change", "make_update", "measure_steps", "moved_against",
    "movement_summary", "movement_table", "old_intervals", "over_batches", "read_moments", "right_direction_shares",
    "settle_step", "signal_sentence", "similarity", "state_step", "tabulate_step", "undo_clip", "update_cost",
    "weighting_sentences", "without_extremes",
]  # fmt: skip
