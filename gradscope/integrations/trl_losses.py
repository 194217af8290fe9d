"""What one optimizer step of TRL's trainers weighs each token with, and which trainers have no other loss than that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from gradscope.errors import InputError
from gradscope.integrations.trl_batch import Inputs, batch_from_trl, response_denominators, trl_settings
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
"""TRL's trainers that are measured."""
LOSS_METHODS = ("_compute_loss", "compute_loss")
"""Methods that make up a trainer's loss; an override of one may make another loss."""
SLOPES = "slopes"
"""In the inputs as the callback keeps them for `SlopeLoss`: ∂loss/∂ log π [B, C] as the trainer's own backward pass
handed it back."""
SUMMED_LOGPROBS = "logps"
"""In the inputs of RLOO as the callback keeps them: the responses' log π [B] of the trainer's own forward pass."""


@runtime_checkable
class StepLoss(Protocol):
    """A loss whose gradient in one optimizer step is −Σ_i 1/D_i Σ_t w_t · ∇ log π_t."""

    def weights(self, window: Sequence[Inputs], batch: TokenBatch, before: TokenStatistics) -> Float[Tensor, "B S"]:
        """w_t of each token; before: of the policy that is about to step. window: micro-batches, batch: all in one."""

    def denominators(self, window: Sequence[Inputs]) -> Float[Tensor, " B"]:
        """Return D_i of each response, for the gradient of this process alone."""


def step_loss(trainer: Any) -> StepLoss:
    """Return the loss of GRPOTrainer or RLOOTrainer, or of a subclass that does not change it.

    Raises InputError for another trainer, for one with a loss of its own, by name, and for settings that
    `trl_settings` refuses.
    """
    kind = _find_kind(trainer)
    if (own := own_loss(trainer)) is not None:
        raise InputError(
            f"{own} is not {kind}'s, so the loss may be another than the one that would be measured; leave the "
            "callback out, or measure with a trainer that keeps TRL's loss"
        )
    if trainer.aux_loss_enabled:
        raise InputError(
            f"the loss has an auxiliary part of the experts' router (router_aux_loss_coef is "
            f"{trainer.router_aux_loss_coef}), which is no sum over tokens; set it to 0.0 to measure"
        )
    if kind == "RLOOTrainer":
        high = trainer.args.epsilon if trainer.args.epsilon_high is None else trainer.args.epsilon_high
        return RLOOLoss(trainer.args.epsilon, high)
    settings = replace(trl_settings(trainer.args).loss, reweight_alpha=getattr(trainer, "reweight_alpha", None))
    return GRPOLoss(trainer, settings, getattr(trainer, "weighting", None))


def measured_loss(trainer: Any) -> StepLoss:
    """Return `step_loss` or, where it knows no weights, the loss by the slopes of the trainer's own backward pass.

    Raises InputError for another trainer, and where these slopes come too late, twice or scaled.
    """
    _find_kind(trainer)
    try:
        return step_loss(trainer)
    except InputError as error:
        reasons = {
            "DeepSpeed steps before its slopes are known": trainer.is_deepspeed_enabled,
            "fp16 scales its slopes": trainer.args.fp16,
            "Lopti steps twice": getattr(trainer, "lopti_eta", None) is not None,
        }
        if found := [reason for reason, holds in reasons.items() if holds]:
            raise InputError(f"{error}; nor can it be measured by its slopes: {found[0]}") from error
    return SlopeLoss()


def left_out(trainer: Any) -> list[str]:
    """Name the parts of a trainer's loss that are no function of log π."""
    parts = [("_entropy_bonus_enabled", "the entropy bonus"), ("aux_loss_enabled", "the routers' auxiliary loss")]
    return [words for name, words in parts if getattr(trainer, name, False)]


@dataclass(frozen=True)
class SlopeLoss:
    """Any loss of the log-probabilities, by ∂loss/∂ log π as the window holds it."""

    def weights(self, window: Sequence[Inputs], batch: TokenBatch, before: TokenStatistics) -> Float[Tensor, "B S"]:
        # TRL's log-probabilities are padded and joined with the others; these come in their place.
        placed = batch_from_trl([part | {"old_per_token_logps": part[SLOPES]} for part in window], 1.0)
        return -self._size(window) * placed.old_logprobs.nan_to_num(0.0)

    def denominators(self, window: Sequence[Inputs]) -> Float[Tensor, " B"]:
        return torch.full((sum(len(part["completion_ids"]) for part in window),), self._size(window))

    def _size(self, window: Sequence[Inputs]) -> float:
        """Return the tokens' number, about what a loss divides by, so that weights are of the size of advantages."""
        return float(max(1, sum(int(part["completion_mask"].sum()) for part in window)))


@dataclass(frozen=True)
class GRPOLoss:
    """GRPOTrainer's loss, if it is Eq. 1, or with another weighting in place of its policy part."""

    trainer: Any
    settings: LossSettings
    weighting: Weighting | None = None

    def weights(self, window: Sequence[Inputs], batch: TokenBatch, before: TokenStatistics) -> Float[Tensor, "B S"]:
        found = batch_weights(before.logprob, batch, self.settings, num_tokens=batch.num_tokens)
        return found.total if self.weighting is None else self._weigh(window, before) + found.kl

    def _weigh(self, window: Sequence[Inputs], before: TokenStatistics) -> Float[Tensor, "B S"]:
        """Return the weighting's, thresholds over each micro-batch; TRL then multiplies by the correction for its
        sampler.
        """
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
    """RLOOTrainer's loss: one ratio r_i = π(o_i)/π_old(o_i) for the whole response, clipped, times its Â_i.

    −1/B Σ_i min(r_i Â_i, clip(r_i, 1 − ε_low, 1 + ε_high) Â_i) over a micro-batch, of which every token has the weight
    r_i Â_i, or 0 where r_i is cut. KL and baseline are in Â_i already.
    """

    clip_ratio_low: float
    clip_ratio_high: float

    def weights(self, window: Sequence[Inputs], batch: TokenBatch, before: TokenStatistics) -> Float[Tensor, "B S"]:
        """r_i is of the log-probabilities that the trainer had, where the window holds them.

        A response's ratio is a sum over its tokens, which another precision than the trainer's would put elsewhere.
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
    """Return which of TRAINERS it is. Raises InputError for another."""
    kind = next((c.__name__ for c in type(trainer).__mro__ if _is_trls(c) and c.__name__ in TRAINERS), None)
    if kind is None:
        raise InputError(
            f"the trainer is a {type(trainer).__name__}; give TRL's {' or '.join(TRAINERS)}, or a subclass of one"
        )
    return kind


def _is_trls(kind: type) -> bool:
    """Return whether a class is from TRL's stable trainers or one of their bases."""
    return kind.__module__.startswith(("trl.trainer.", "transformers."))


def own_loss(trainer: Any) -> str | None:
    """Return the first method of the loss, as Class.method, that is neither TRL's nor gradscope's; None if there is
    none.
    """
    for name in LOSS_METHODS:
        if name in vars(trainer):
            return f"{type(trainer).__name__}.{name}, set on the trainer itself,"
        # gradscope's own, which stands before a trainer, hands on to whatever comes next.
        owners = (kind for kind in type(trainer).__mro__ if name in vars(kind))
        owner = next(kind for kind in owners if not kind.__module__.startswith("gradscope."))
        if not _is_trls(owner):
            return f"{owner.__name__}.{name}"
    return None
