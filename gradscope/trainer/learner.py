"""The trained policy with its optimizer and reference, on this process's device.

    accelerate launch --multi_gpu --num_processes 8 -m gradscope train …                    one GPU each
    accelerate launch --multi_gpu --num_processes 2 -m gradscope train --device cpu …       the same without GPUs

Each process has the whole weights, and gradients are averaged (DDP). accelerate's `--cpu` starts only one process (or
needs MPI).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gradscope.errors import InputError
from gradscope.objective import TokenStatistics, Updater, batch_statistics
from gradscope.policy import (
    Policy,
    asked_by_peft,
    find_checkpoint,
    find_device,
    load_policy,
    merged_parameters,
    without_cudnn_attention,
)
from gradscope.rollouts import TokenBatch
from gradscope.runs import ALONE_AGAIN, Processes, join_processes, launched, writing
from gradscope.trainer.config import TrainConfig

if TYPE_CHECKING:
    from accelerate import Accelerator

TRACKERS = "trackers"
"""Folder of a run for TensorBoard logs."""
ADAPTER = "adapter"
"""Folder of a checkpoint for the separate adapters; the checkpoint's weights are merged."""
GROUPS: list[torch.distributed.ProcessGroup] = []
"""Keeps process groups alive: DDP's reducer would join their threads while holding the GIL, and can deadlock."""


@dataclass(frozen=True)
class Learner:
    """The trained policy, its optimizer and its reference model."""

    policy: Policy
    """The trained model itself, not its DistributedDataParallel wrapper."""
    updater: Updater
    reference: nn.Module | None
    """The initial policy; None without KL, or if it is the policy without its adapters."""
    adapters: Any | None
    """The PeftModel around the policy; None: all weights are trained."""
    computing: Callable[[], AbstractContextManager]
    """Precision and attention kernels of sampling and training."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.updater.optimizer

    @property
    def processes(self) -> Processes:
        return self.updater.processes

    def statistics(self, batch: TokenBatch) -> TokenStatistics:
        """Compute log π, log(1−π) and entropy of the batch's response tokens under the current policy."""
        return self._statistics(self.updater.model, batch)

    def reference_logprobs(self, batch: TokenBatch) -> Tensor:
        """Compute log π_ref of the batch's response tokens [B, S]."""
        if self.reference is not None:
            return self._statistics(self.reference, batch).logprob
        with self.adapters.disable_adapter():
            return self._statistics(self.updater.model, batch).logprob

    def _statistics(self, model: nn.Module, batch: TokenBatch) -> TokenStatistics:
        size, device = self.updater.micro_batch_size, self.updater.device
        with self.computing():
            return batch_statistics(model, batch, micro_batch_size=size, device=device, processes=self.processes)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every parameter by name, with adapters merged in; tied ones once."""
        return merged_parameters(self.policy.model)

    def is_finite(self) -> bool:
        """Return whether all trained weights are finite."""
        trained = [p.detach() for p in self.policy.model.parameters() if p.requires_grad]
        return bool(nn.utils.get_total_norm(trained, float("inf")).isfinite())

    def set_learning_rate(self, value: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = value


def make_accelerator(config: TrainConfig, out: Path) -> Accelerator:
    """Make the accelerate.Accelerator. Raises InputError for an unknown or missing tracker, or a missing device."""
    from accelerate import Accelerator
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

    here = {str(getattr(name, "value", name)) for name in get_available_trackers()}
    if missing := [name for name in config.trackers if name not in here]:
        known = "is not installed" if missing[0] in LOGGER_TYPE_TO_CLASS else "is not a tracker of accelerate"
        raise InputError(f"tracker {missing[0]!r} {known}; at hand: {', '.join(sorted(here)) or 'none'}")
    device = None if config.device is None else torch.device(find_device(config.device))
    on_cpu = device is not None and device.type == "cpu"
    if device is not None and not on_cpu:
        torch.cuda.set_device(device)
    if launched() > 1 and not torch.distributed.is_initialized() and (on_cpu or torch.cuda.is_available()):
        join_processes("gloo" if on_cpu else "nccl")
    accelerator = Accelerator(
        cpu=on_cpu,
        mixed_precision="no",  # `config.precision` decides
        log_with=list(config.trackers) or None,
        project_dir=str(out),
    )
    if accelerator.num_processes > 1:
        GROUPS.append(torch.distributed.group.WORLD)
    return accelerator


@contextmanager
def ending_trackers(accelerator: Accelerator, out: Path) -> Iterator[None]:
    """Close the trackers and accelerate's process group at the end of the block."""
    try:
        yield
    finally:
        with writing(out / TRACKERS):
            accelerator.end_training()


def init_trackers(accelerator: Accelerator, config: TrainConfig, out: Path, done: int, processes: Processes) -> None:
    """Start the trackers; TensorBoard hides anything that an earlier start logged after step `done`."""
    settings = {"tensorboard": {"purge_step": done + 1}}
    chosen = {name: value for name, value in settings.items() if name in config.trackers}
    with processes.together(), writing(out / TRACKERS):
        try:
            accelerator.init_trackers(TRACKERS, init_kwargs=chosen)
        except OSError:
            accelerator.trackers.clear()  # trackers that failed to start cannot be closed
            raise


def check_launch(config: TrainConfig, accelerator: Accelerator) -> None:
    """Raise InputError for an unsupported launch, or one that contradicts `config`."""
    asked = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if asked not in ("no", {"float32": "no", "bfloat16": "bf16"}[config.precision]):
        raise InputError(
            f"accelerate was launched with mixed_precision {asked}, but precision is {config.precision}; set "
            "--precision, and launch with the same or none"
        )
    if accelerator.num_processes == 1 and launched() > 1:
        raise InputError(
            f"WORLD_SIZE={launched()} announces {launched()} processes, but there is no GPU; give --device cpu, or "
            f"{ALONE_AGAIN}"
        )
    kind, shards = accelerator.distributed_type.value, os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
    if kind not in ("NO", "MULTI_GPU", "MULTI_CPU") or shards:
        raise InputError("the trainer does not shard weights; launch with --multi_gpu")


def build_learner(config: TrainConfig, accelerator: Accelerator, checkpoint: Path | None = None) -> Learner:
    """Load the policy of the configuration, or of a checkpoint of this run, with its optimizer and reference.

    Raises InputError as `check_launch` does, and if the policy does not support adapters or recomputation.
    """
    check_launch(config, accelerator)
    how = {"dtype": "float32", "device": str(accelerator.device), "chat_template_kwargs": config.chat_template_kwargs}
    original, adapted = find_checkpoint(config.model), config.lora_rank is not None
    policy = load_policy(original if checkpoint is None or adapted else checkpoint, **how)
    model = policy.model
    _remove_noise(model)
    adapters = _add_adapters(model, config, checkpoint) if adapted else None
    if config.gradient_checkpointing:
        _checkpoint_activations(model)
    # Named, so that the saved state identifies its parameters.
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    updater = Updater(
        accelerator.prepare_model(model) if accelerator.num_processes > 1 else model,
        torch.optim.AdamW(trained, lr=config.learning_rate, weight_decay=config.weight_decay),
        accelerator.device,
        config.micro_batch_size,
        config.max_grad_norm,
        Processes(accelerator.process_index, accelerator.num_processes),
        accelerator.no_sync,
    )
    needed = config.kl_coef > 0 and not adapted
    reference = load_policy(original, **how).model.requires_grad_(False) if needed else None
    own = partial(_computing, accelerator.device, mixed=config.precision == "bfloat16")
    return Learner(policy, updater, reference, adapters, own)


@contextmanager
def _computing(device: torch.device, *, mixed: bool) -> Iterator[None]:
    """Set precision and attention kernels, also in backward passes, since recomputed activations must match.

    mixed: autocast to bfloat16.
    """
    with torch.autocast(device.type, torch.bfloat16) if mixed else nullcontext(), without_cudnn_attention():
        yield


def _add_adapters(model: nn.Module, config: TrainConfig, checkpoint: Path | None) -> Any:
    """Add low-rank adapters (LoRA, by peft) to the model, new or from a checkpoint; only these are trained.

    Raises InputError without peft, for a mixture of experts, and for a rank above the model's width.
    """
    try:
        from peft import LoraConfig, PeftModel, get_peft_model
    except ImportError as error:
        raise InputError("lora_rank needs peft, which is not installed: pip install 'gradscope[lora]'") from error
    from transformers.pytorch_utils import Conv1D

    if checkpoint is not None:
        with asked_by_peft():
            return PeftModel.from_pretrained(model, checkpoint / ADAPTER, is_trainable=True, local_files_only=True)
    width = getattr(model.config.get_text_config(), "hidden_size", config.lora_rank)
    if config.lora_rank > width:
        raise InputError(f"lora_rank is {config.lora_rank} and the policy is {width} wide; give {width} at most")
    settings = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        target_modules="all-linear",
        lora_dropout=0.0,
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),  # GPT-2's weights are transposed
    )
    with asked_by_peft(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)  # the adapters' first factors are random
        adapters = get_peft_model(model, settings)
    if any(type(module).__name__ == "ParamWrapper" for module in model.modules()):
        raise InputError(
            f"{type(model).__name__} is a mixture of experts: their adapters cannot be merged here; leave lora_rank out"
        )
    return adapters


def _remove_noise(model: nn.Module) -> None:
    """Switch off dropout and jitter in every mode, so that π_old and π_θ differ only in their weights.

    Some modules store the dropout rate, others read it from the configuration each time.
    """
    for holder in [model.config.get_text_config(), *model.modules()]:
        for name, value in list(vars(holder).items()):
            if isinstance(value, float) and ("drop" in name or "jitter" in name):
                setattr(holder, name, 0.0)
        if isinstance(holder, nn.modules.dropout._DropoutNd):
            holder.p = 0.0


@torch.no_grad()
def _checkpoint_activations(model: nn.Module) -> None:
    """Recompute activations in the backward pass, which transformers does only in training mode."""
    ids = torch.arange(8, device=model.device)[None] % model.config.get_text_config().vocab_size
    wanted = model(input_ids=ids, use_cache=False).logits
    new, old = "activation_checkpointing_enable", "gradient_checkpointing_enable"  # transformers 5.24 renamed it
    try:
        getattr(model, new if hasattr(model, new) else old)({"use_reentrant": False})
    except ValueError as error:
        raise InputError(f"{type(model).__name__} does not support gradient_checkpointing; leave it out") from error
    model.train()
    if not torch.allclose(model(input_ids=ids, use_cache=False).logits, wanted, rtol=1e-3, atol=1e-4):
        raise InputError(
            f"{type(model).__name__} computes different logits in training mode, which gradient_checkpointing needs; "
            "leave it out"
        )
