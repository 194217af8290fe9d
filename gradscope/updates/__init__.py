"""The effect of an optimizer step on every token: movements, directions, influence, and comparison of weightings."""

from gradscope.updates.audit import Audit, audit
from gradscope.updates.auditing.applied import StepAudit, audit_step
from gradscope.updates.auditing.readings import TrainedLoss
from gradscope.updates.auditing.recover import gradient_of_moments, undo_clip
from gradscope.updates.auditing.suite import SUITE, Average, SuiteAudit, audit_suite, check_kl, is_suite, write_suite
from gradscope.updates.comparison.compare import compare, compare_cost, compare_rows, distinct_rows
from gradscope.updates.comparison.describe import (
    ONE_BATCH,
    WHAT_STAYS,
    describe,
    gain_sentence,
    signal_sentence,
    weighting_sentences,
)
from gradscope.updates.comparison.result import Comparison, ComparisonChoices, ComparisonSettings
from gradscope.updates.directions import (
    SIGNS,
    batch_direction_shares,
    log_odds_change,
    right_direction_shares,
    similarity,
)
from gradscope.updates.influence import (
    BY,
    SIDES,
    Influence,
    influence_cost,
    influence_table,
    moved_against,
)
from gradscope.updates.make_update import UPDATES, make_update, old_intervals
from gradscope.updates.movement import movement_table
from gradscope.updates.optimizer_step import OptimizerStep, apply_update, apply_updates, influence, update_cost
from gradscope.updates.spike import Spike, SpikedStep, explain_spike, tabulate_step
from gradscope.updates.step_settings import SGD, StepSettings, read_moments, settle_step, state_step

__all__ = [
    "BY", "ONE_BATCH", "SGD", "SIDES", "SIGNS", "SUITE", "UPDATES", "WHAT_STAYS", "Audit", "Average", "Comparison",
    "ComparisonChoices", "ComparisonSettings", "Influence", "OptimizerStep", "Spike", "SpikedStep", "StepAudit",
    "StepSettings", "SuiteAudit", "TrainedLoss", "apply_update", "apply_updates", "audit", "audit_step",
    "audit_suite", "batch_direction_shares", "check_kl", "compare", "compare_cost", "compare_rows", "describe",
    "distinct_rows", "explain_spike", "gain_sentence", "gradient_of_moments", "influence", "influence_cost",
    "influence_table", "is_suite", "log_odds_change", "make_update", "moved_against", "movement_table",
    "old_intervals", "read_moments", "right_direction_shares", "settle_step", "signal_sentence", "similarity",
    "state_step", "tabulate_step", "undo_clip", "update_cost", "weighting_sentences", "write_suite",
]  # fmt: skip
