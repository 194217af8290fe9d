"""What is at the door: a file is loaded when one of its names is first used."""

from .batch_logprobs import (
    Choose as Choose,
    batch_statistics as batch_statistics,
    choosing_places as choosing_places,
    fitting_size as fitting_size,
    has_plain_head as has_plain_head,
    kept_logprobs as kept_logprobs,
    loss_logprobs as loss_logprobs,
    micro_batches as micro_batches,
)
from .equations import (
    grpo_advantages as grpo_advantages,
    kl_k3 as kl_k3,
    lopti_split as lopti_split,
    policy_loss as policy_loss,
    reinforce_pp_advantages as reinforce_pp_advantages,
    reweight as reweight,
    token_weights as token_weights,
)
from .logprobs import (
    TokenStatistics as TokenStatistics,
    gather_logprobs as gather_logprobs,
    logit_gradient as logit_gradient,
    parts_at_once as parts_at_once,
    rows_at_once as rows_at_once,
    statistics_and_gradient as statistics_and_gradient,
    widen as widen,
)
from .loss import (
    PAPER as PAPER,
    LossSettings as LossSettings,
    batch_loss as batch_loss,
    batch_weights as batch_weights,
    check_weighting as check_weighting,
    own_where_unknown as own_where_unknown,
    resolve_advantages as resolve_advantages,
    weigh_step as weigh_step,
)
from .methods import ORDERS as ORDERS, Method as Method, random_split as random_split
from .off_policy import (
    describe_off_policyness as describe_off_policyness,
    off_policy_columns as off_policy_columns,
    off_policy_sentence as off_policy_sentence,
    off_policyness as off_policyness,
)
from .shared_prompts import can_pack as can_pack
from .steps import (
    Pass as Pass,
    PassTotals as PassTotals,
    StepResult as StepResult,
    Updater as Updater,
    clip_scale as clip_scale,
    split_passes as split_passes,
    whole_passes as whole_passes,
)
from .weighting import AGGREGATIONS as AGGREGATIONS, Tokens as Tokens, Weighting as Weighting, within as within
from .weightings import (
    COMPARED as COMPARED,
    SOURCES as SOURCES,
    WEIGHTINGS as WEIGHTINGS,
    make_weighting as make_weighting,
    spell_out as spell_out,
)
