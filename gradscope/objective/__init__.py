"""The equations: advantages, token weights, the loss, log π, and the optimizer step that is trained and measured."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "batch_logprobs": [
            "Choose",
            "batch_statistics",
            "choosing_places",
            "fitting_size",
            "has_plain_head",
            "kept_logprobs",
            "loss_logprobs",
            "micro_batches",
        ],
        "equations": [
            "grpo_advantages",
            "kl_k3",
            "lopti_split",
            "policy_loss",
            "reinforce_pp_advantages",
            "reweight",
            "token_weights",
        ],
        "logprobs": [
            "TokenStatistics",
            "gather_logprobs",
            "logit_gradient",
            "parts_at_once",
            "rows_at_once",
            "statistics_and_gradient",
            "widen",
        ],
        "loss": [
            "LossSettings",
            "PAPER",
            "batch_loss",
            "batch_weights",
            "check_weighting",
            "own_where_unknown",
            "resolve_advantages",
            "weigh_step",
        ],
        "methods": ["Method", "ORDERS", "random_split"],
        "shared_prompts": ["can_pack"],
        "weightings": ["AGGREGATIONS", "Tokens", "WEIGHTINGS", "Weighting", "make_weighting", "within"],
        "steps": ["Pass", "PassTotals", "StepResult", "Updater", "clip_scale", "split_passes", "whole_passes"],
    },
)
