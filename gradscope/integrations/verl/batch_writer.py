"""Write what verl's trainers train on, from their driver, as native rows; `verl_rollouts` installs it in verl.

This module does not import verl: its trainer, batch and configuration are passed as arguments.
"""

from __future__ import annotations

import json
import math
import time
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from gradscope.errors import InputError
from gradscope.integrations.row_writer import (
    PER_CANDIDATE,
    Part,
    RowWriter,
    Spikes,
    StepRows,
    remove_steps,
    step_file,
    to_array,
)
from gradscope.objective import LossSettings
from gradscope.rollouts import LOSS_KEY
from gradscope.runs import counted

COLUMNS = {
    **{"response_mask": "response_mask", "advantages": "advantage", "old_log_probs": "old_logprobs"},
    **{"ref_log_prob": "ref_logprobs", "rollout_log_probs": "sampler_logprobs"},
    "rollout_is_weights": "sampler_correction",
}
"""verl's tensor [B, R] → name in rows; those from the fourth on are optional."""
WEIGHING = ("advantage", "sampler_correction")
"""Names in rows of what weighs tokens."""
SCORES = ("token_level_scores", "rm_scores")
"""verl's names for the tokens' scores; the first present one is used."""
FOLDER, EVERY, TEXT = "GRADSCOPE_ROLLOUTS", "GRADSCOPE_ROLLOUTS_EVERY", "GRADSCOPE_ROLLOUTS_TEXT"
SPIKE, SPIKES = "GRADSCOPE_ROLLOUTS_SPIKE", "GRADSCOPE_ROLLOUTS_SPIKES"
VARIABLES = (FOLDER, EVERY, TEXT, SPIKE, SPIKES)
"""Environment variables."""
ESTIMATORS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
"""verl's kl_loss_type → the estimator of the KL penalty. Any name with a + behind it has the gradient of k2."""
ESTIMATED = ESTIMATORS | {"abs": "abs"}
"""verl's distillation_loss.loss_mode → the estimator of OPD, for losses on sampled tokens."""
LARGEST_K3, DUAL = 10.0, 3.0
"""Bound that verl puts on k3, and its dual clip of a distillation, which has no setting."""
CANNOT_SAY = "which rows of rollouts cannot express"
IMAGES = "multi_modal_inputs"
TEACHER, TEACHER_IDS = "teacher_logprobs", "teacher_ids"
"""verl's tensors [B, P + R, k], about the next token each: its own, or those of the teacher's likeliest k."""
OVER_CANDIDATES = "forward_kl_topk"
"""verl's loss_mode for a KL over the teacher's likeliest tokens."""
FIELDS = ("prompts", "responses", "loss_mask", *COLUMNS, SCORES[1], TEACHER, TEACHER_IDS, "uid")
"""Fields read from the store of the default trainer's batches."""


def verl_loss(config: Any) -> LossSettings | None:
    """Return the settings of the actor's loss, from verl's whole configuration.

    None: a KL over the teacher's likeliest tokens alone, no weight on ∇ log π: rows have these tokens and no advantage.
    Raises InputError for a loss that rows cannot express, naming the setting.
    """
    actor, policy = config.actor_rollout_ref.actor, config.actor_rollout_ref.actor.policy_loss
    if (weighting := _distillation(config)) == OVER_CANDIDATES:
        return None
    mode, correction = policy.get("loss_mode", "vanilla"), config.algorithm.get("rollout_correction", None)
    bypass = bool(correction and correction.get("bypass_mode", False))
    if bypass or mode == "bypass_mode":
        _check_bypass(correction if bypass else policy.rollout_correction)
    elif mode not in ("vanilla", "gradscope"):
        raise InputError(f"actor.policy_loss.loss_mode is {mode}, {CANNOT_SAY}; use vanilla")
    for name in ("lopti_eta", "weighting"):
        if policy.get(name, None) is not None:
            found = f"actor.policy_loss.{name} is {policy.get(name)}"
            raise InputError(f"{found}, {CANNOT_SAY}; leave out that setting or the writer")
    if actor.get("entropy_coeff", 0):
        raise InputError(f"actor.entropy_coeff is {actor.entropy_coeff}, a bonus {CANNOT_SAY}; set it to 0")
    kind = actor.kl_loss_type if actor.use_kl_loss else "low_var_kl"
    if (estimator := "k2" if kind.endswith("+") else ESTIMATORS.get(kind)) is None:
        raise InputError(f"actor.kl_loss_type is {kind}, {CANNOT_SAY}; use one of {', '.join(ESTIMATORS)}")
    if actor.loss_agg_mode == "seq-mean-token-sum-norm" and actor.get("loss_scale_factor", None) is None:
        raise InputError(
            "actor.loss_scale_factor is null, so seq-mean-token-sum-norm divides by each micro-batch's width, "
            f"{CANNOT_SAY}; give a number"
        )
    several = actor.ppo_mini_batch_size < config.data.train_batch_size
    if actor.loss_agg_mode == "token-mean" and several and actor.get("shuffle", False):
        raise InputError(f"actor.shuffle is true: token-mean divides by mini-batches {CANNOT_SAY}; set it to false")
    low, high = (actor.get(name, None) for name in ("clip_ratio_low", "clip_ratio_high"))
    low, high = (actor.clip_ratio if value is None else value for value in (low, high))
    kl_coef = actor.kl_loss_coef if actor.use_kl_loss else 0.0
    dual, alpha = actor.get("clip_ratio_c", 3.0), policy.get("reweight_alpha", None)
    settings = LossSettings(low, high, dual, kl_coef, alpha, kl_estimator=estimator, weighting=weighting)
    settings.check()
    return settings


def _distillation(config: Any) -> str | None:
    """Return the weighting of a distillation on sampled tokens, or OVER_CANDIDATES; None without one.

    Raises InputError for another distillation, and for factors that verl multiplies it by.
    """
    known = config.get("distillation", None) or {}
    if not known.get("enabled", False):
        return None
    loss = known["distillation_loss"]
    name, mode = "distillation.distillation_loss.loss_mode", loss.get("loss_mode", "k3")
    if mode == OVER_CANDIDATES and not (loss.use_policy_gradient or loss.use_task_rewards):
        return mode
    if (estimator := ESTIMATED.get(mode)) is None:
        raise InputError(
            f"{name} is {mode}, no loss on sampled tokens, {CANNOT_SAY} as a policy gradient or beside rewards; use "
            f"one of {', '.join(ESTIMATED)}"
        )
    told = {"estimator": estimator, "policy_gradient": int(loss.use_policy_gradient)}
    clamp = math.inf if loss.get("loss_max_clamp", None) is None else loss.loss_max_clamp
    told["clamp"] = min(clamp, LARGEST_K3) if estimator == "k3" else clamp
    if loss.use_policy_gradient:
        correction = config.algorithm.get("rollout_correction", None)
        if correction and correction.get("rollout_is", None) is not None:
            raise InputError(
                f"algorithm.rollout_correction.rollout_is is {correction.rollout_is}, a factor of the distillation "
                f"{CANNOT_SAY}; leave it out, or set distillation.distillation_loss.use_policy_gradient to false"
            )
        told |= {
            "eps_low": loss.clip_ratio_low,
            "eps_high": loss.clip_ratio_high,
            "dual": loss.get("clip_ratio_c", 3.0),
        }
    if loss.use_task_rewards:
        told |= {"coef": loss.distillation_loss_coef, "reward": "term"}
    return "opd:" + ",".join(f"{name}={value}" for name, value in told.items() if value != math.inf)


def _check_bypass(correction: Any) -> None:
    """Raise InputError unless the bypass's loss is vanilla with the sampler's log-probabilities as the old ones."""
    for name, plain in (("loss_type", "ppo_clip"), ("rollout_rs", None)):
        if (value := correction.get(name, plain)) != plain:
            raise InputError(f"in bypass_mode rollout_correction.{name} is {value}, {CANNOT_SAY}; leave it out")


def response_divisors(
    actor: Any, kept: Float[Tensor, " B"], counted: Float[Tensor, " B"], *, mini_batch: int, processes: int
) -> Float[Tensor, " B"]:
    """Return the divisor of each response's summed terms in the mean over the batch's mini-batches.

    kept, counted: number of each response's tokens that its mask keeps, and that verl counts for token-mean.
    mini_batch: responses per optimizer step, split evenly among processes, each of which has a consecutive part of the
    batch.
    """
    size = len(kept)
    steps = size // mini_batch
    if actor.loss_agg_mode == "token-mean":
        own = torch.arange(size) % (size // processes) // (mini_batch // processes)
        divisors = torch.zeros(steps).index_add(0, own, counted)[own]
    elif actor.loss_agg_mode == "token-sum":
        divisors = torch.ones(size)
    else:
        divisors = torch.full((size,), float(mini_batch))
        if actor.loss_agg_mode == "seq-mean-token-mean":
            divisors = divisors * kept
        elif actor.loss_agg_mode == "seq-mean-token-sum-norm":
            divisors = divisors * actor.loss_scale_factor
    return steps * divisors.clamp(min=1)  # a response without tokens has no terms


@dataclass(frozen=True)
class WriterSettings:
    """Which of verl's steps to write, where, and whether with text."""

    folder: Path | None = None
    """None: gradscope/rollouts in the folder of verl's checkpoints (trainer.default_local_dir)."""
    every: int | None = 1
    """None: only the steps of `spike`."""
    text: bool = False
    spike: float | None = None
    """Also write steps whose gradient norm is not finite, or above this many times the median of the previous ones."""
    spikes: int = 10
    """Largest number of such steps."""


def read_settings(environment: Mapping[str, str]) -> WriterSettings:
    """Read the settings from environment variables. Raises InputError for an invalid value or an unknown name."""
    if strange := sorted(name for name in environment if name.startswith(FOLDER) and name not in VARIABLES):
        raise InputError(f"{strange[0]} is not a setting; give one of {', '.join(VARIABLES)}")
    folder, spike = environment.get(FOLDER), environment.get(SPIKE)
    if folder is not None and (not folder or Path(folder).is_file()):
        raise InputError(f"{FOLDER} is {folder!r}, which is not a folder; give one, or leave it out")
    numbers = {name: environment.get(name, default) for name, default in ((EVERY, "1"), (SPIKES, "10"))}
    for name, value in numbers.items():
        if not (value.isdecimal() and int(value)) and not (name == EVERY and value == "none" and spike is not None):
            raise InputError(f"{name} is {value!r}; give 1 or more" + f", or none beside {SPIKE}" * (name == EVERY))
    if (text := environment.get(TEXT, "0")) not in ("0", "1"):
        raise InputError(f"{TEXT} is {text!r}; give 1 or 0")
    if spike is not None and not 1 < _to_float(spike) < math.inf:
        raise InputError(f"{SPIKE} is {spike!r}; give a multiple of the median norm above 1, such as 3")
    every = None if numbers[EVERY] == "none" else int(numbers[EVERY])
    spike = None if spike is None else float(spike)
    return WriterSettings(folder and Path(folder), every, text == "1", spike, int(numbers[SPIKES]))


def put_into(trainer: type, writer: VerlWriter) -> None:
    """Pass each update of the actor to the writer, by wrapping two methods of one of verl's trainers."""
    update_actor, shutdown = trainer._update_actor, trainer._shutdown_dump_executor

    @wraps(update_actor)
    def watched(self: Any, batch: Any, *args: Any, **keywords: Any) -> Any:
        writer.take(self, batch)
        found = update_actor(self, batch, *args, **keywords)
        # The default trainer fills the metrics passed to it, the older one returns them.
        given = (*args, *keywords.values())
        writer.updated(self, given[0] if given else found.meta_info["metrics"])
        return found

    @wraps(shutdown)
    def drained(self: Any) -> None:
        shutdown(self)  # where verl waits for its own background writes
        writer.close()

    trainer._update_actor, trainer._shutdown_dump_executor = watched, drained


class VerlWriter:
    """Writer of a verl trainer's batches; `take` is called before each update of the actor."""

    def __init__(self, settings: WriterSettings) -> None:
        self.settings = settings
        self.folder: Path | None = None
        self.steps: list[int] = []
        """Steps handed to the writing process."""
        self.seconds = 0.0
        """Wall time of the driver spent here."""
        self._spikes = None if settings.spike is None else Spikes(settings.spike, settings.spikes)
        self._updates: list[_Update] = []
        """Updates of the current step."""
        self._process: RowWriter | None = None

    def take(self, trainer: Any, batch: Any) -> None:
        """Copy the batch of the actor's next update: a DataProto, or the metadata of a stored batch."""
        start, step = time.perf_counter(), int(trainer.global_steps)
        self._updates = [update for update in self._updates if update.step == step]
        if self.folder is None:
            local = Path(trainer.config.trainer.default_local_dir) / "gradscope" / "rollouts"
            self.folder = self.settings.folder or local
            self._loss = verl_loss(trainer.config)
            remove_steps(self.folder, step)
        if (self._is_due(step) or self._spikes is not None) and not self._has_images(trainer, batch):
            self._updates.append(_make_update(trainer, batch, candidates=self._loss is None))
        self.seconds += time.perf_counter() - start

    def updated(self, trainer: Any, metrics: Mapping[str, Any]) -> None:
        """Queue the step for writing once its last update is done. metrics: verl's, of the update."""
        start = time.perf_counter()
        if self._updates:
            norms = metrics.get("actor/grad_norm")
            self._updates[-1].norm = None if norms is None else float(np.mean(norms))
            if len(self._updates) == getattr(trainer, "parameter_sync_step", 1):
                self._hand_over(trainer)
        self.seconds += time.perf_counter() - start

    def close(self) -> None:
        """Wait until everything is written."""
        if self._process is not None:
            self._process.close()
            self._process = None
            print(f"gradscope: rollouts of {counted(len(self.steps), 'step')} are in {self.folder}")

    def _is_due(self, step: int) -> bool:
        return self.settings.every is not None and (step - 1) % self.settings.every == 0

    def _hand_over(self, trainer: Any) -> None:
        updates, self._updates = self._updates, []
        step, num_tokens = updates[0].step, sum(update.num_tokens for update in updates)
        norms = [update.norm for update in updates if update.norm is not None]
        spiked = self._spikes is not None and bool(norms) and self._spikes.tell(float(np.max(norms)))
        if not (spiked or self._is_due(step)) or not num_tokens:
            return
        if self._process is None:
            self._process = RowWriter(trainer.tokenizer if self.settings.text else None)
        parts = [
            dict(update.part) | {"loss_scale": num_tokens / (len(updates) * update.divisors)} for update in updates
        ]
        shared = {"step": step, "temperature": float(trainer.config.actor_rollout_ref.rollout.temperature)}
        shared["grad_norm"] = updates[0].norm if len(updates) == updates[0].num_steps == 1 else None
        told = {} if self._loss is None else {LOSS_KEY: json.dumps(asdict(self._loss))}
        self._process.put(StepRows(str(step_file(self.folder, step)), parts, shared, told))
        self.steps.append(step)

    def _has_images(self, trainer: Any, batch: Any) -> bool:
        """Return whether prompts contain images; if so, warn."""
        if getattr(trainer, "processor", None) is None:
            return False
        given = batch.non_tensor_batch.get(IMAGES, ()) if hasattr(batch, "batch") else _stored(batch, [IMAGES])[IMAGES]
        if not any(len(one) for one in (given.tolist() if hasattr(given, "tolist") else given)):
            return False
        warnings.warn("gradscope: rollouts of prompts with images are not written: rows hold only tokens", stacklevel=3)
        return True


def _to_float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


@dataclass
class _Update:
    """Copy of a batch that the actor was updated with."""

    step: int
    part: Part
    divisors: np.ndarray
    num_tokens: int
    num_steps: int
    """Optimizer steps."""
    norm: float | None = None
    """verl's gradient norm, averaged over its steps."""


def _make_update(trainer: Any, batch: Any, *, candidates: bool) -> _Update:
    """Copy a batch. candidates: whether the teacher's log-probabilities are of its likeliest tokens, which the loss is
    of, so that there are no advantages."""
    tensors, part, real = _from_padded(batch) if hasattr(batch, "batch") else _from_store(batch)
    ids, logprobs = (part.pop(name, None) for name in (TEACHER_IDS, TEACHER))
    if logprobs is not None:
        part |= dict(zip(PER_CANDIDATE, (ids, logprobs), strict=True)) if candidates else {TEACHER: logprobs[:, :, 0]}
    part |= {name: to_array(tensors[own]) for own, name in COLUMNS.items() if own in tensors}
    if candidates:
        part = {name: own for name, own in part.items() if name not in WEIGHING}
    elif (scores := next((tensors[name] for name in SCORES if name in tensors), None)) is not None:
        part["reward"] = to_array(scores.sum(-1))
    config, kept = trainer.config.actor_rollout_ref, tensors["response_mask"].float().sum(1)
    mini_batch = config.actor.ppo_mini_batch_size * config.rollout.n
    counted, processes = tensors.get("loss_mask", tensors["response_mask"]), _num_processes(trainer.actor_rollout_wg)
    divisors = response_divisors(
        config.actor, kept.cpu(), counted.float().sum(1).cpu(), mini_batch=mini_batch, processes=processes
    )
    part["process"], place = np.divmod(np.arange(len(kept)), len(kept) // processes)
    micro_batch = config.actor.get("ppo_micro_batch_size_per_gpu", None)
    if not (micro_batch is None or config.actor.use_dynamic_bsz or config.actor.get("shuffle", False)):
        part["micro_batch"] = place // micro_batch
    part = {name: values[real] for name, values in part.items()}
    num_steps = len(kept) // mini_batch * config.actor.ppo_epochs
    return _Update(int(trainer.global_steps), part, to_array(divisors)[real], int(kept.sum()), num_steps)


def _num_processes(workers: Any) -> int:
    """Return the number of processes that share the actor's batch."""
    ranks = workers._dispatch_info.get("actor") or workers._query_dispatch_info("actor")
    return max(ranks) + 1


def _from_padded(data: Any) -> tuple[Mapping[str, Tensor], dict[str, np.ndarray], slice]:
    """Return the tensors of a DataProto, the ids and masks of its prompts and responses, and a slice of all rows."""
    tensors = data.batch
    width = tensors["prompts"].shape[1]
    mask = to_array(tensors["attention_mask"])
    part = {"prompt_ids": to_array(tensors["prompts"]), "response_ids": to_array(tensors["responses"])}
    part |= {"prompt_mask": mask[:, :width], "response_seen": mask[:, width:]}
    part |= {name: to_array(tensors[name][:, width - 1 : -1]) for name in (TEACHER, TEACHER_IDS) if name in tensors}
    if "uid" in data.non_tensor_batch:
        part["group"] = data.non_tensor_batch["uid"].astype(str)
    return {name: tensors[name] for name in (*COLUMNS, *SCORES) if name in tensors}, part, slice(None)


def _from_store(batch: Any) -> tuple[Mapping[str, Tensor], dict[str, np.ndarray], np.ndarray]:
    """Return the same for a batch in TransferQueue, whose tensors are nested, and which of its rows are not padding."""
    data = _stored(batch, FIELDS)
    groups = np.array(data["uid"].tolist()).astype(str)
    tensors = {name: data[name] for name in FIELDS if name != "uid" and name in data}
    part = {}
    for name, own in (("prompt_ids", "prompts"), ("response_ids", "responses")):
        nested = tensors.pop(own)
        lengths, part[name] = to_array(nested.offsets().diff()), to_array(nested.to_padded_tensor(0))
        mask = "prompt_mask" if own == "prompts" else "response_seen"
        part[mask] = np.arange(part[name].shape[1]) < lengths[:, None]
    part["group"] = groups
    for known in (TEACHER, TEACHER_IDS):
        if (teacher := tensors.pop(known, None)) is not None:
            each = [to_array(own) for own in teacher.unbind()]
            part[known] = np.zeros((*part["response_ids"].shape, each[0].shape[1]), each[0].dtype)
            for row, own in enumerate(each):
                start, count = (int(part[name][row].sum()) for name in ("prompt_mask", "response_seen"))
                part[known][row, :count] = own[start - 1 : start - 1 + count]
    real = np.array([not tag.get("is_padding", False) for tag in batch.tags])
    return {name: values.to_padded_tensor(0) for name, values in tensors.items()}, part, real


def _stored(batch: Any, fields: Any) -> Any:
    """Read fields of a batch from TransferQueue, which its trainer has already loaded."""
    import transfer_queue

    return transfer_queue.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=[*fields])
