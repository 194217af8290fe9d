"""Token weightings and Lopti's passes as modifications of verl's functions (Eq. 4 and Alg. 1, arXiv:2505.12929).

This module does not import verl: its functions and configuration are passed as arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from gradscope.errors import InputError
from gradscope.objective import LossSettings, StepRule, check_weighting, make_weighting, weigh_step

RUNNING_PASS: ContextVar[str | None] = ContextVar("RUNNING_PASS", default=None)
"""Name of the engine's current pass; None outside Lopti's two."""


def check_methods(settings: Any) -> None:
    """Raise InputError for meaningless settings (fields of `verl.GradScopePolicyLossConfig`)."""
    StepRule(settings.reweight_alpha, settings.lopti_eta, settings.lopti_order)
    if settings.weighting is not None:
        if settings.reweight_alpha is not None or settings.lopti_eta is not None:
            raise InputError("weighting is given beside reweight_alpha or lopti_eta; give one of them")
        weighting = make_weighting(settings.weighting)
        if weighting.alpha_and_eta is not None:
            raise InputError(f"weighting is {settings.weighting}; give reweight_alpha and lopti_eta instead, or none")
        check_weighting(weighting, entropy=False, sampler_logprobs=False)  # verl's policy losses get neither
    if settings.lopti_pass not in (None, "low", "high"):
        raise InputError(f"lopti_pass is {settings.lopti_pass!r}; give low, high (that group alone) or null (both)")
    if settings.lopti_pass is not None and settings.lopti_eta is None:
        raise InputError(f"lopti_pass is {settings.lopti_pass} without lopti_eta, which splits the groups; give both")


def changed_policy_loss(
    vanilla: Callable[..., tuple[Tensor, dict[str, Any]]],
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """Call `vanilla`, a policy loss of verl, with the advantages given by `config.policy_loss`; tensors are [B, T].

    With `reweight_alpha`, Â becomes [α·π_old + 1 − α]·Â. With `lopti_pass` "low", only tokens with π_old < `lopti_eta`
    keep their advantage, with "high" only the others; a token of advantage 0 has no gradient but is still counted, so
    that the denominator of every `loss_agg_mode` is unchanged. With `weighting`, each token's slope is the weighting's
    w_t, with thresholds over the micro-batch's tokens; verl's metrics stay those of its own loss. With none of them,
    vanilla is called unchanged. Raises InputError for a `lopti_eta` without `lopti_pass` if no engine takes the passes.
    """
    settings = config.policy_loss
    alpha, eta, only = settings.reweight_alpha, settings.lopti_eta, settings.lopti_pass
    if eta is not None and only is None and RUNNING_PASS.get() is None:
        raise InputError(
            f"lopti_eta is {eta}, but verl's engine takes one pass; use strategy fsdp or fsdp2 and start verl with "
            "VERL_ENGINE_VENDOR=gradscope and "
            "VERL_USE_EXTERNAL_MODULES=gradscope.integrations.verl,gradscope.integrations.verl_engine"
        )
    keywords = {"log_prob": log_prob, "response_mask": response_mask, "loss_agg_mode": loss_agg_mode, "config": config}
    keywords["rollout_is_weights"] = rollout_is_weights
    if settings.weighting is not None:
        with torch.no_grad():
            metrics = vanilla(old_log_prob=old_log_prob, advantages=advantages, **keywords)[1]
        mask, weighting = response_mask.bool(), make_weighting(settings.weighting)
        weights = weigh_step(weighting, log_prob, old_log_prob, advantages, mask, _clips(config))
        # At ratio 1 nothing is clipped, and the slope is −Â.
        return vanilla(old_log_prob=log_prob.detach(), advantages=weights, **keywords)[0], metrics
    advantages = StepRule(alpha).advantages(advantages, old_log_prob)
    if only is not None:
        advantages = advantages.masked_fill(~pass_mask(old_log_prob, response_mask, eta=eta, name=only), 0.0)
    return vanilla(old_log_prob=old_log_prob, advantages=advantages, **keywords)


def _clips(config: Any) -> LossSettings:
    """Read the clip ratios as verl's vanilla loss does."""
    low, high = (config.get(name) for name in ("clip_ratio_low", "clip_ratio_high"))
    low, high = (config.clip_ratio if value is None else value for value in (low, high))
    return LossSettings(low, high, config.get("clip_ratio_c", 3.0), 0.0)


def pass_mask(old_log_prob: Tensor, response_mask: Tensor, *, eta: int | float, name: str) -> Tensor:
    """Return the mask of pass `name`'s tokens, by `StepRule.groups`; tensors are [B, T], or nested with the same row
    lengths.
    """
    if not response_mask.is_nested:
        return dict(StepRule(lopti_eta=eta).groups(old_log_prob, response_mask.bool()))[name]
    flat = pass_mask(old_log_prob.values()[None], response_mask.values()[None], eta=eta, name=name)[0]
    chosen = response_mask.clone()  # a clone pads to the same length as verl's own mask; a new nested tensor may not
    chosen.values().copy_(flat)
    return chosen


def pass_loss(loss_function: Callable[..., Any], *, eta: int | float, name: str) -> Callable[..., Any]:
    """Return verl's loss of a micro-batch, restricted to the response tokens of pass `name`.

    Policy, KL and entropy terms cover these tokens only, divided by verl's counts of the whole mini-batch.
    """

    def loss(*, model_output: Any, data: Any, **keywords: Any) -> Any:
        data = data.copy()
        data["response_mask"] = pass_mask(data["old_log_probs"], data["response_mask"], eta=eta, name=name)
        return loss_function(model_output=model_output, data=data, **keywords)

    return loss
