"""What is touched inside TRL 1.16's trainers, and transformers' Trainer and trackers: each once, and nowhere else."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from gradscope.errors import InputError

WORKS_WITH = "1.16"
"""Version of TRL with all of these."""
LOGPROBS = "_get_per_token_logps_and_entropies"
"""Method that returns log π, entropies and the routers' auxiliary loss of completions; without it no token is seen."""
LOSS = ("_compute_loss", "compute_loss")
"""Methods that make the loss; without them a loss of your own passes for TRL's, and Reweight and Lopti do nothing."""
PREPARE = "_prepare_inputs"
"""Method that makes or takes a micro-batch's responses; without it Lopti's second pass would draw new ones."""
SCORE, GENERATE = "_calculate_rewards", "_generate_and_score_completions"
"""Methods that return all processes' rewards [B, functions] and a generation's inputs; without, rows lack rewards."""
MASKS = ("get_high_entropy_mask", "get_off_policy_mask")
"""Methods that return masks for GRPO's loss; without them tokens that it leaves out are counted as trained."""
CLIP, NORM = "_clip_grad_norm", "_get_grad_norm"
"""Trainer's methods that clip, and return the norm before it; without the second nothing measured is compared."""
METRICS = "_metrics"
"""{"train": {name: values since the last log}}; without it TRL's log has nothing of gradscope's, nor KTO's z₀."""
HEAD = "_ChunkedLogProbFunction"
"""Function of `trl.trainer.utils` that walks over the logits for log π; without it there is no Σπ² for ‖e − π‖."""
STEP_TIME, KL = "step_time", "kl"
"""Metrics with the seconds of a step, and (KTO) with a micro-batch's z₀ over all processes."""
ADDITIVE = ("kl", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean")
"""Metrics that are means over all tokens of a quantity that is 0 for tokens outside the current pass."""
TRACKERS = {"wandb": "_wandb", "trackio": "_trackio", "mlflow": "_ml_flow"}
"""Attribute of transformers' callback that holds the tracker's module, once `_initialized`; else nothing is sent."""

INTERNALS = {
    "GRPOTrainer": (LOGPROBS, *LOSS, PREPARE, SCORE, GENERATE, *MASKS, METRICS),
    "RLOOTrainer": (LOGPROBS, *LOSS, SCORE, GENERATE, METRICS),
    "SFTTrainer": (LOSS[1], METRICS),
    "DPOTrainer": (*LOSS, METRICS),
    "KTOTrainer": (*LOSS, METRICS),
    "Trainer": (CLIP, NORM),
}
"""Class → what is touched of its instances."""


def check_internals(trainer: Any, *, head: bool = False) -> None:
    """Raise InputError for the first internal that the trainer lacks; head: also HEAD."""
    kinds = [kind for kind in type(trainer).__mro__ if not kind.__module__.startswith("gradscope.")]
    known = vars(trainer).keys() | {name for kind in kinds for name in vars(kind)}
    wanted = [(kind.__name__, name) for kind in kinds for name in INTERNALS.get(kind.__name__, ())]
    missing = [f"{kind}.{name}" for kind, name in wanted if name not in known]
    if head and not hasattr(_utils(), HEAD):
        missing.append(f"trl.trainer.utils.{HEAD}")
    if missing:
        found = f"TRL {version('trl')} with transformers {version('transformers')} has no {missing[0]}"
        raise InputError(f"{found}, which gradscope needs; TRL {WORKS_WITH} has: pip install 'trl=={WORKS_WITH}.*'")


class OverriddenMethods:
    """Hands GRPOTrainer's methods on to a mixin's that change them: each with TRL's own method, or what it returns."""

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        return self._prepare_by(super()._prepare_inputs, generation_batch)

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        return self._make_loss_by(super()._compute_loss, model, inputs)

    def _get_per_token_logps_and_entropies(self, *args: Any, **keywords: Any) -> tuple:
        return self._hear(super()._get_per_token_logps_and_entropies(*args, **keywords))


def metrics_of(trainer: Any) -> dict[str, list[float]]:
    """Return the values of TRL's training metrics since its last log, to add to."""
    return trainer._metrics["train"]


def log_numbers(trainer: Any, prefix: str, numbers: Mapping[str, float]) -> None:
    """Have TRL's next log average these with those of other steps since its last; what is not finite is left out."""
    for name, value in numbers.items():
        if math.isfinite(value):
            metrics_of(trainer)[f"{prefix}/{name}"].append(float(value))


def clip_gradient(trainer: Any, model: Any) -> float:
    """Clip the gradient as the trainer does before a step, if it does; return the norm before that."""
    norm = trainer._clip_grad_norm(model) if trainer.args.max_grad_norm > 0 else None
    return float(trainer._get_grad_norm(model, grad_norm=norm))


def tracker_modules(trainer: Any, names: Sequence[str] = ("wandb", "trackio")) -> Iterator[Any]:
    """Yield those of the TRACKERS' modules that have a run in this trainer; wandb and trackio share an interface."""
    for callback in trainer.callback_handler.callbacks:
        for name in names:
            module = getattr(callback, TRACKERS[name], None)
            if module is not None and getattr(callback, "_initialized", False):
                yield module


@contextmanager
def summing_squares(*, without_gradients: bool = True) -> Iterator[None]:
    """Have TRL's head give log Σπ², too, in the walk over the logits that it makes for log π and entropy.

    without_gradients: also in passes that compute no gradient.
    """
    utils = _utils()
    own = getattr(utils, HEAD)

    class Summing:
        @staticmethod
        def apply(*args: Any) -> Any:
            *others, outputs = args
            added = ("log_sum_sq_probs",) if without_gradients or torch.is_grad_enabled() else ()
            return own.apply(*others, (*outputs, *added))

    setattr(utils, HEAD, Summing)
    try:
        yield
    finally:
        setattr(utils, HEAD, own)


def _utils() -> Any:
    from trl.trainer import utils

    return utils
