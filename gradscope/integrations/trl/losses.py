"""Which of TRL's trainers are watched, whether Eq. 1 describes their loss, and its slopes where it does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jaxtyping import Bool, Float
from torch import Tensor

from gradscope.errors import InputError
from gradscope.integrations.trl.batch import (
    LOSS_TYPES,
    batch_from_trl,
    join_columns,
    no_counterpart,
    response_denominators,
    trl_settings,
)
from gradscope.integrations.trl.internals import LOSS
from gradscope.integrations.trl.watch import SeenBatch, set_on
from gradscope.objective import LossSettings, batch_weights

SAMPLED = ("GRPOTrainer", "RLOOTrainer")
"""TRL's trainers on sampled responses that can be watched."""
ON_TEXT = ("SFTTrainer", "DPOTrainer", "KTOTrainer")
"""TRL's trainers on given text that can be watched."""
WITHOUT_LOGPROBS = {"DistillationTrainer": "a divergence of whole distributions, in which no token's log π stands out"}
"""TRL's trainers whose loss no token's weight expresses, and what it is."""


def other_loss(trainer: Any) -> str | None:
    """Name what makes a trainer's loss another than Eq. 1's in the settings of its GRPOConfig; None: it is that.

    The slopes of another loss are known from the trainer's own backward pass alone. Raises InputError for other
    trainers than SAMPLED and their subclasses.
    """
    kind = find_kind(trainer, SAMPLED)
    if (own := own_loss(trainer)) is not None:
        return own
    if kind == "RLOOTrainer":
        return "RLOOTrainer, whose ratio is of whole responses"
    if (weighting := getattr(trainer, "weighting", None)) is not None:
        return f"the weighting {weighting}"
    if trainer.aux_loss_enabled:
        return f"router_aux_loss_coef is {trainer.router_aux_loss_coef}"
    return no_counterpart(trainer.args)


def settings_loss(trainer: Any) -> LossSettings:
    """Return Eq. 1's settings of a trainer's loss. Raises InputError for settings that `trl_settings` refuses."""
    return replace(trl_settings(trainer.args).loss, reweight_alpha=getattr(trainer, "reweight_alpha", None))


def settings_slopes(trainer: Any, parts: Sequence[SeenBatch], loss: LossSettings) -> Float[Tensor, "B S"]:
    """Return ∂loss/∂ log π by Eq. 1 with TRL's denominators, at the trainer's own log π, joined over micro-batches."""
    window = [part.inputs for part in parts]
    batch = batch_from_trl(window, trainer.temperature)
    logprobs = join_columns(window, [part.logprob.float() for part in parts])
    weights = batch_weights(logprobs, batch, loss, num_tokens=batch.num_tokens).total
    divisors = response_denominators(trainer.args, window, num_processes=trainer.accelerator.num_processes)
    return -weights / divisors[:, None]


def clipped_tokens(trainer: Any, part: SeenBatch) -> Bool[Tensor, "B C"] | Bool[Tensor, "B 1"] | None:
    """Return where TRL's own loss clips or caps a ratio; None for a loss without clips."""
    advantages = part.inputs["advantages"]
    advantages = advantages if advantages.dim() == 2 else advantages[:, None]
    if "old_logps" in part.inputs:  # RLOO's, of whole responses
        ratio = ((part.logprob * part.kept).sum(1) - part.inputs["old_logps"]).exp()[:, None]
        kind, cap = "rloo", None
    else:
        ratio, kind, cap = part.logprob - part.old, trainer.loss_type, trainer.args.delta
        if trainer.importance_sampling_level == "sequence":
            ratio = ((ratio * part.kept).sum(1) / part.kept.sum(1).clamp(min=1))[:, None]
        ratio = ratio.exp()
    if kind == "cispo":
        return (ratio > trainer.epsilon_high) & (advantages > 0)
    if kind not in (*LOSS_TYPES, "rloo"):
        return None
    # Where −min(min(r, cap)·Â, clip(r)·Â) is flat: a cap below 1 + ε_high acts for Â > 0, one above for Â < 0.
    high = 1 + trainer.epsilon_high
    clipped = (ratio < 1 - trainer.epsilon_low) & (advantages < 0)
    clipped |= (ratio > (high if cap is None else min(high, cap))) & (advantages > 0)
    return clipped if cap is None else clipped | (ratio > max(high, cap)) & (advantages < 0)


def find_kind(trainer: Any, among: Sequence[str] = (*SAMPLED, *ON_TEXT)) -> str:
    """Return which of these TRL's trainers the trainer is. Raises InputError for any other."""
    own = [kind.__name__ for kind in type(trainer).__mro__ if _is_trls(kind)]
    if kind := next((name for name in own if name in among), None):
        return kind
    loss = next((f", whose loss is {WITHOUT_LOGPROBS[name]}" for name in own if name in WITHOUT_LOGPROBS), "")
    wanted = f"give TRL's {', '.join(among[:-1])} or {among[-1]}, or a subclass of one"
    raise InputError(f"the trainer is a {type(trainer).__name__}{loss}; {wanted}")


def refuse_scaled(trainer: Any) -> None:
    """Raise InputError if ∂loss/∂ log π comes back times a scale that the trainer does not know."""
    if trainer.is_deepspeed_enabled and trainer.args.fp16:
        raise InputError(
            "DeepSpeed scales the loss in fp16, and so the tokens' weights; train in bf16, or leave it out"
        )


def own_loss(trainer: Any) -> str | None:
    """Return as Class.method the first method of the loss that is neither TRL's nor gradscope's; None if none is."""
    find_kind(trainer)
    for name in LOSS:
        if set_on(trainer, name) is not None:
            return f"{type(trainer).__name__}.{name}, set on the trainer itself"
        # gradscope's own mixin calls the next class's method.
        owners = (kind for kind in type(trainer).__mro__ if name in vars(kind))
        owner = next((kind for kind in owners if not kind.__module__.startswith("gradscope.")), None)
        if owner is not None and not _is_trls(owner):
            return f"{owner.__name__}.{name}"
    return None


def _is_trls(kind: type) -> bool:
    """Return whether a class is one of TRL's stable trainers or their bases."""
    return kind.__module__.startswith(("trl.trainer.", "transformers."))
