"""What is at the door: a file is loaded when one of its names is first used."""

from .comparison.compare import Comparison as Comparison, compare as compare, compare_cost as compare_cost
from .comparison.words import (
    NO_RECOMMENDATION as NO_RECOMMENDATION,
    WHAT_STAYS as WHAT_STAYS,
    describe as describe,
    gain_sentence as gain_sentence,
    signal_sentence as signal_sentence,
)
from .directions import (
    SIGNS as SIGNS,
    batch_direction_shares as batch_direction_shares,
    movement_summary as movement_summary,
    net_weights as net_weights,
    over_batches as over_batches,
    right_direction_shares as right_direction_shares,
    similarity as similarity,
    without_extremes as without_extremes,
)
from .first_order import (
    BY as BY,
    fits_at_once as fits_at_once,
    influence as influence,
    influence_cost as influence_cost,
    influence_table as influence_table,
    moved_against as moved_against,
)
from .movement import (
    apply_update as apply_update,
    apply_updates as apply_updates,
    movement_table as movement_table,
    update_cost as update_cost,
)
from .step import SGD as SGD, StepSettings as StepSettings, read_moments as read_moments, state_step as state_step
from .tuning.counts import count_tokens as count_tokens, tune_batch as tune_batch
from .tuning.linear import KINDS as KINDS, Setting as Setting, linearise_cost as linearise_cost, make_grid as make_grid
from .tuning.report import report as report
from .tuning.screen import (
    ENOUGH_BATCHES as ENOUGH_BATCHES,
    MIN_TOKENS as MIN_TOKENS,
    Screening as Screening,
    is_held_out as is_held_out,
    screen as screen,
)
from .variants import Variant as Variant, old_intervals as old_intervals
