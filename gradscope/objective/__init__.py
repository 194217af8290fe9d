"""The equations: advantages, token weights, the loss, log π, and the optimizer step that is trained and measured."""

from gradscope.objective.batch_logprobs import (
    batch_statistics,
    choosing_places,
    evaluate_kept,
    finish,
    fitting_size,
    given_at,
    given_for,
    join_statistics,
    kept_logprobs,
    kept_numbers,
    loss_logprobs,
    make_ready,
    micro_batches,
    most_logits,
)
from gradscope.objective.equations import (
    KL,
    Estimator,
    TokenWeights,
    grpo_advantages,
    kl_k3,
    lopti_split,
    policy_loss,
    reinforce_pp_advantages,
    reweight,
    token_weights,
)
from gradscope.objective.logprobs import (
    TokenStatistics,
    gather_logprobs,
    logit_gradient,
    parts_at_once,
    rows_at_once,
    widen,
)
from gradscope.objective.loss import (
    PAPER,
    LossSettings,
    batch_loss,
    batch_weights,
    check_weighting,
    fill_unknown,
    resolve_advantages,
    settle_advantages,
    settle_loss,
    weigh_step,
)
from gradscope.objective.off_policy import describe_off_policyness, off_policy_sentence, off_policyness
from gradscope.objective.quantities import LOGPROB, Divergence, Given, Outputs, Quantity, make_quantity
from gradscope.objective.shared_prompts import can_pack
from gradscope.objective.step_rule import ORDERS, StepRule
from gradscope.objective.updater import StepResult, StepTokens, Update, Updater, clip_scale, split_steps
from gradscope.objective.weighting import Tokens, Weighting, within
from gradscope.objective.weightings import COMPARED, SOURCES, WEIGHTINGS, make_weighting, spell_out

__all__ = [
    "COMPARED", "KL", "LOGPROB", "ORDERS", "PAPER", "SOURCES", "WEIGHTINGS", "Divergence", "Estimator", "Given",
    "LossSettings", "Outputs", "Quantity", "StepResult", "StepRule", "StepTokens", "TokenStatistics",
    "TokenWeights", "Tokens", "Update", "Updater", "Weighting", "batch_loss", "batch_statistics", "batch_weights",
    "can_pack", "check_weighting", "choosing_places", "clip_scale", "describe_off_policyness", "evaluate_kept",
    "fill_unknown", "finish", "fitting_size", "gather_logprobs", "given_at", "given_for", "grpo_advantages",
    "join_statistics", "kept_logprobs", "kept_numbers", "kl_k3", "logit_gradient", "lopti_split", "loss_logprobs",
    "make_quantity", "make_ready", "make_weighting", "micro_batches", "most_logits", "off_policy_sentence",
    "off_policyness", "parts_at_once", "policy_loss", "reinforce_pp_advantages", "resolve_advantages", "reweight",
    "rows_at_once", "settle_advantages", "settle_loss", "spell_out", "split_steps", "token_weights", "weigh_step",
    "widen", "within",
]  # fmt: skip
