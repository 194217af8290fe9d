"""Token weights of one optimizer step of TRL's trainers, and the check that a trainer uses such a loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from gradscope.errors import InputError
from gradscope.integrations.trl.batch import Inputs, batch_from_trl, response_denominators, trl_settings
from gradscope.objective import (
    LossSettings,
    TokenStatistics,
    Weighting,
    batch_weights,
    fill_unknown,
    weigh_step,
)
from gradscope.rollouts import TokenBatch

TRAINERS = ("GRPOTrainer", "RLOOTrainer")
"""TRL's trainers that can be measured."""
LOSS_METHODS = ("_compute_loss", "compute_loss")
"""Methods that define a trainer's loss; an override may change it."""
SLOPES = "slopes"
"""Key in the inputs recorded for `SlopeLoss`: ∂loss/∂ log π [B, C] from the trainer's own backward pass."""
SUMMED_LOGPROBS = "logps"
"""Key in the inputs recorded for RLOO: the responses' log π [B] from the trainer's own forward pass."""


@runtime_checkable
class StepLoss(Protocol):
    """A loss whose gradient in one optimizer step is −Σ_i 1/D_i Σ_t w_t · ∇ log π_t."""

    def weights(self, window: Sequence[Inputs], batch: TokenBatch, before: TokenStatistics) -> Float[Tensor, "B S"]:
        """Return w_t of each token. window: micro-batches; batch: all in one; before: of the policy before the step."""

    def denominators(self, window: Sequence[Inputs]) -> Float[Tensor, " B"]:
        """Return D_i of each response, for the gradient of this process alone."""


def step_loss(trainer: Any) -> StepLoss:
    """Return the loss of GRPOTrainer or RLOOTrainer, or of a subclass that does not change it.

    Raises InputError for other trainers, for a trainer with its own loss, and for settings that `trl_settings` refuses.
    """
    kind = _find_kind(trainer)
    if (own := own_loss(trainer)) is not None:
        raise InputError(
            f"{own} is not {kind}'s, so the loss may differ from the one that would be measured; leave the "
            "callback out, or measure with a trainer that keeps TRL's loss"
        )
    return settings_loss(trainer)


def settings_loss(trainer: Any) -> StepLoss:
    """Return the loss that a trainer's settings describe, whether or not its class computes another.

    Raises InputError for other trainers than TRL's and their subclasses, and for settings that `trl_settings` refuses.
    """
    kind = _find_kind(trainer)
    if trainer.aux_loss_enabled:
        raise InputError(
            f"the loss has an auxiliary part for the experts' router (router_aux_loss_coef is "
            f"{trainer.router_aux_loss_coef}), which is not a sum over tokens; set it to 0.0 to measure"
        )
    if kind == "RLOOTrainer":
        high = trainer.args.epsilon if trainer.args.epsilon_high is None else trainer.args.epsilon_high
        return RLOOLoss(trainer.args.epsilon, high)
    settings = replace(trl_settings(trainer.args).loss, reweight_alpha=getattr(trainer, "reweight_alpha", None))
    return GRPOLoss(trainer, settings, getattr(trainer, "weighting", None))


def measured_loss(trainer: Any) -> StepLoss:
    """Return `step_loss` or, if that is refused, a loss given by the slopes of the trainer's own backward pass.

    Raises InputError for other trainers, and if these slopes come too late, twice or scaled.
    """
    _find_kind(trainer)
    try:
        return step_loss(trainer)
    except InputError as error:
        reasons = {
            "DeepSpeed steps before it is known": trainer.is_deepspeed_enabled,
            "fp16 scales it": trainer.args.fp16,
            "Lopti steps twice": getattr(trainer, "lopti_eta", None) is not None,
        }
        if found := [reason for reason, holds in reasons.items() if holds]:
            raise InputError(f"{error}; nor can ∂loss/∂ log π be used: {found[0]}") from error
    return SlopeLoss()


def left_out(trainer: Any) -> list[str]:
    """Name the parts of a trainer's loss that are not functions of log π."""
    parts = [("_entropy_bonus_enabled", "the entropy bonus"), ("aux_loss_enabled", "the routers' auxiliary loss")]
    return [words for name, words in parts if getattr(trainer, name, False)]


@dataclass(frozen=True)
class SlopeLoss:
    """Any loss of the log-probabilities, given by the ∂loss/∂ log π recorded in the window."""

    def weights(self, window: Sequence[Inputs], batch: TokenBatch, before: TokenStatistics) -> Float[Tensor, "B S"]:
        # Slopes take the place of the old log-probabilities, to be padded and joined in the same way.
        placed = batch_from_trl([part | {"old_per_token_logps": part[SLOPES]} for part in window], 1.0)
        return -self._size(window) * placed.old_logprobs.nan_to_num(0.0)

    def denominators(self, window: Sequence[Inputs]) -> Float[Tensor, " B"]:
        return torch.full((sum(len(part["completion_ids"]) for part in window),), self._size(window))

    def _size(self, window: Sequence[Inputs]) -> float:
        """Return the number of tokens, about a loss's divisor, so that weights are of the size of advantages."""
        return float(max(1, sum(int(part["completion_mask"].sum()) for part in window)))


@dataclass(frozen=True)
class GRPOLoss:
    """GRPOTrainer's loss, if it is Eq. 1, optionally with another weighting for its policy part."""

    trainer: Any
    settings: LossSettings
    weighting: Weighting | None = None

    def weights(self, window: Sequence[Inputs], batch: TokenBatch, before: TokenStatistics) -> Float[Tensor, "B S"]:
        found = batch_weights(before.logprob, batch, self.settings, num_tokens=batch.num_tokens)
        return found.total if self.weighting is None else self._weigh(window, before) + found.kl

    def _weigh(self, window: Sequence[Inputs], before: TokenStatistics) -> Float[Tensor, "B S"]:
        """Return the weighting's w_t, with thresholds over each micro-batch, times TRL's correction for its sampler."""
        ones = [part | {"advantages": torch.ones_like(part["advantages"])} for part in window]
        raw = [{name: value for name, value in part.items() if name != "importance_sampling_ratio"} for part in window]
        sampled = [part | {"old_per_token_logps": part.get("sampling_per_token_logps")} for part in raw]
        whole, corrections = (batch_from_trl(parts, self.trainer.temperature) for parts in (raw, ones))
        known = None
        if all(part["old_per_token_logps"] is not None for part in sampled):
            known = batch_from_trl(sampled, self.trainer.temperature).old_logprobs
        old, pieces, start = fill_unknown(whole.old_logprobs, before.logprob), [], 0
        for part in window:
            rows = slice(start, start := start + len(part["completion_ids"]))
            tokens = (before.logprob[rows], old[rows], whole.advantages[rows], whole.response_mask[rows])
            more = {"entropy": before.entropy[rows], "sampler_logprobs": None if known is None else known[rows]}
            pieces.append(weigh_step(self.weighting, *tokens, self.settings, **more))
        return torch.cat(pieces) * torch.where(whole.response_mask, corrections.advantages, 0.0)

    def denominators(self, window: Sequence[Inputs]) -> Float[Tensor, " B"]:
        processes = self.trainer.accelerator.num_processes
        return response_denominators(self.trainer.args, window, num_processes=processes)


@dataclass(frozen=True)
class RLOOLoss:
    """RLOOTrainer's loss: one clipped ratio r_i = π(o_i)/π_old(o_i) per response, times its Â_i.

    −1/B Σ_i min(r_i Â_i, clip(r_i, 1 − ε_low, 1 + ε_high) Â_i) over a micro-batch. Every token of response i has the
    weight r_i Â_i, or 0 if r_i is clipped. Â_i already includes KL and baseline.
    """

    clip_ratio_low: float
    clip_ratio_high: float

    def weights(self, window: Sequence[Inputs], batch: TokenBatch, before: TokenStatistics) -> Float[Tensor, "B S"]:
        """Return r_i Â_i or 0, with r_i from the trainer's own log-probabilities if the window has them.

        A response's log ratio sums over its tokens, so that another precision than the trainer's would change it.
        """
        own, parts, start = (before.logprob * batch.response_mask).sum(1), [], 0
        for part in window:
            rows = slice(start, start := start + len(part["old_logps"]))
            logps = part[SUMMED_LOGPROBS].float().cpu() if SUMMED_LOGPROBS in part else own[rows]
            ratio, advantages = (logps - part["old_logps"].float().cpu()).exp(), part["advantages"].float().cpu()
            cut = ratio.clamp(1 - self.clip_ratio_low, 1 + self.clip_ratio_high)
            parts.append(torch.where(ratio * advantages <= cut * advantages, ratio * advantages, 0.0))
        return torch.cat(parts)[:, None] * batch.response_mask

    def denominators(self, window: Sequence[Inputs]) -> Float[Tensor, " B"]:
        sizes = [len(part["completion_ids"]) for part in window]
        return torch.tensor([float(size * len(sizes)) for size in sizes for _ in range(size)])


def _find_kind(trainer: Any) -> str:
    """Return which of TRAINERS the trainer is. Raises InputError for any other."""
    kind = next((c.__name__ for c in type(trainer).__mro__ if _is_trls(c) and c.__name__ in TRAINERS), None)
    if kind is None:
        raise InputError(
            f"the trainer is a {type(trainer).__name__}; give TRL's {' or '.join(TRAINERS)}, or a subclass of one"
        )
    return kind


def _is_trls(kind: type) -> bool:
    """Return whether a class is one of TRL's stable trainers or their bases."""
    return kind.__module__.startswith(("trl.trainer.", "transformers."))


def own_loss(trainer: Any) -> str | None:
    """Return as Class.method the method of the loss that is neither TRL's nor gradscope's; None: there is none."""
    for name in LOSS_METHODS:
        if name in vars(trainer):
            return f"{type(trainer).__name__}.{name}, set on the trainer itself,"
        # gradscope's own mixin calls the next class's method.
        owners = (kind for kind in type(trainer).__mro__ if name in vars(kind))
        owner = next(kind for kind in owners if not kind.__module__.startswith("gradscope."))
        if not _is_trls(owner):
            return f"{owner.__name__}.{name}"
    return None
