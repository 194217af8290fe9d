"""What is at the door: a file is loaded when one of its names is first used."""

from .columns import (
    ADAMW as ADAMW,
    LAYER as LAYER,
    LOGITS as LOGITS,
    PARAMETERS as PARAMETERS,
    describe_reread as describe_reread,
    refuse_endless_weights as refuse_endless_weights,
)
from .cost.machine import Rates as Rates, describe_seconds as describe_seconds, gpu_rates as gpu_rates
from .cost.measuring import Response as Response, floor_flops as floor_flops, measure_flops as measure_flops
from .cost.outline import config_of as config_of, outline_policy as outline_policy, shape_of as shape_of
from .cost.pilot import make_pilot as make_pilot
from .cost.plan import MeasurePlan as MeasurePlan, plan_batch as plan_batch
from .cost.shape import (
    BYTES as BYTES,
    Dtype as Dtype,
    ModelShape as ModelShape,
    block_activation_bytes as block_activation_bytes,
)
from .engine.meter import TokenGradientMeter as TokenGradientMeter
from .engine.products import Precision as Precision
from .engine.results import SelfCheck as SelfCheck, TokenGradients as TokenGradients
from .engine.self_check import check_engine as check_engine
from .engine.stack import SequenceTokens as SequenceTokens
from .hooks import (
    capture_activations as capture_activations,
    capture_gradients as capture_gradients,
    first_tensor as first_tensor,
    forward_hooks as forward_hooks,
    measuring as measuring,
)
from .logged import (
    ContradictionWarning as ContradictionWarning,
    find_contradictions as find_contradictions,
    note_logged as note_logged,
)
from .resources import Resources as Resources
from .rounds import (
    PILOT as PILOT,
    Round as Round,
    Stopwatch as Stopwatch,
    join_rounds as join_rounds,
    measure_rounds as measure_rounds,
)
from .sample import (
    SAMPLING_PROBABILITY as SAMPLING_PROBABILITY,
    TokenSample as TokenSample,
    sampling_probabilities as sampling_probabilities,
    sampling_weights as sampling_weights,
    stands_for as stands_for,
    token_sizes as token_sizes,
    weighted_quantiles as weighted_quantiles,
)
from .settings import (
    AFTERWARDS as AFTERWARDS,
    BUDGET as BUDGET,
    EACH_PROMPT as EACH_PROMPT,
    MeasureSettings as MeasureSettings,
    settle_minutes as settle_minutes,
)
from .summed.intervals import (
    IntervalGradients as IntervalGradients,
    gram as gram,
    interval_gradients as interval_gradients,
    interval_gradients_over as interval_gradients_over,
)
from .summed.plan import (
    Index as Index,
    SumsPlan as SumsPlan,
    Way as Way,
    largest_share as largest_share,
    own_rows as own_rows,
    plan_batch_sums as plan_batch_sums,
)
from .summed.prompts import PromptGradients as PromptGradients, fixed_cotangents as fixed_cotangents
from .summed.sketches import Sketcher as Sketcher
from .summed.weighted import (
    BACKWARD as BACKWARD,
    FORWARD_MODE as FORWARD_MODE,
    Derivative as Derivative,
    predict_changes as predict_changes,
    refuse_narrow_arithmetic as refuse_narrow_arithmetic,
    refuse_narrow_weights as refuse_narrow_weights,
    vector_bytes as vector_bytes,
    vectors_within as vectors_within,
    weighted_gradients as weighted_gradients,
    zero_vectors as zero_vectors,
)
from .table import TableMeasurement as TableMeasurement, join_responses as join_responses, measure as measure
