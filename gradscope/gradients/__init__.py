"""Token gradients: the token Jacobian, exact norms in a table, summed gradients by interval and prompt, their cost."""

from gradscope.gradients.budget.allot import AFTER, Afterwards
from gradscope.gradients.budget.cost import (
    ModelShape,
    Plan,
    forward_flops,
    gradient_flops,
    plan_batch,
    plan_sums,
)
from gradscope.gradients.budget.stopwatch import Stopwatch, describe_seconds
from gradscope.gradients.columns import (
    ADAMW,
    LAYER,
    LOGITS,
    PARAMETERS,
    describe_reread,
    refuse_infinite_weights,
    refuse_other_loss,
    statistics_of,
)
from gradscope.gradients.engine.meter import TokenGradientMeter
from gradscope.gradients.engine.self_check import check_engine
from gradscope.gradients.engine.stack import SequenceTokens
from gradscope.gradients.frozen import measuring
from gradscope.gradients.hooks import capture_activations, capture_gradients, first_tensor, forward_hooks
from gradscope.gradients.interval_gradients import IntervalGradients, interval_gradients
from gradscope.gradients.logged_logprobs import ContradictionWarning, note_logged
from gradscope.gradients.measure import TABLE, Hooks, key_of, measure, measure_folder, measure_into, read_table
from gradscope.gradients.operator.contributions import Contributions, GroupSignals
from gradscope.gradients.operator.forward_mode import (
    BACKWARD,
    FORWARD_MODE,
    Derivative,
    refuse_narrow_arithmetic,
    refuse_narrow_weights,
)
from gradscope.gradients.operator.gram import Gram, SumsPlan, Way, block_products, largest_share
from gradscope.gradients.operator.jacobian import TokenJacobian
from gradscope.gradients.operator.sketches import Sketcher
from gradscope.gradients.operator.vectors import Vectors, inner_products, vector_bytes, zero_vectors
from gradscope.gradients.other_policies import with_logprobs_of
from gradscope.gradients.resources import Resources, latest_end
from gradscope.gradients.sample import (
    SAMPLING_PROBABILITY,
    ThresholdSample,
    TokenSample,
    sampling_probabilities,
    sampling_weights,
    stands_for,
    token_sizes,
    weighted_quantiles,
)
from gradscope.gradients.settings import (
    DEFAULT_MINUTES,
    MeasureSettings,
    check_settings,
    settle_batch,
    settle_minutes,
)
from gradscope.gradients.table import TableMeasurement, fill_table
from gradscope.gradients.timed import prepare_measurement

__all__ = [
    "ADAMW", "AFTER", "BACKWARD", "DEFAULT_MINUTES", "FORWARD_MODE", "LAYER", "LOGITS", "PARAMETERS",
    "SAMPLING_PROBABILITY", "TABLE", "Afterwards", "ContradictionWarning", "Contributions", "Derivative", "Gram",
    "GroupSignals", "Hooks", "IntervalGradients", "MeasureSettings", "ModelShape", "Plan", "Resources",
    "SequenceTokens", "Sketcher", "Stopwatch", "SumsPlan", "TableMeasurement", "ThresholdSample", "TokenGradientMeter",
    "TokenJacobian", "TokenSample", "Vectors", "Way", "block_products", "capture_activations", "capture_gradients",
    "check_engine", "check_settings", "describe_reread", "describe_seconds", "fill_table", "first_tensor",
    "forward_flops", "forward_hooks", "gradient_flops", "inner_products", "interval_gradients", "key_of",
    "largest_share", "latest_end", "measure", "measure_folder", "measure_into", "measuring", "note_logged",
    "plan_batch", "plan_sums", "prepare_measurement", "read_table", "refuse_infinite_weights",
    "refuse_narrow_arithmetic", "refuse_narrow_weights", "refuse_other_loss", "sampling_probabilities",
    "sampling_weights", "settle_batch", "settle_minutes", "stands_for", "statistics_of", "token_sizes", "vector_bytes",
    "weighted_quantiles", "with_logprobs_of", "zero_vectors",
]  # fmt: skip
