"""The policy that is trained, its optimizer, its reference, and how several processes share them."""

from __future__ import annotations

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
from gradscope.policy import Policy, find_checkpoint, load_policy, without_cudnn_attention
from gradscope.rollouts import TokenBatch
from gradscope.runs import ALONE, Processes
from gradscope.sampling import Sampler
from gradscope.trainer.adapters import adapted_layers, add_adapters, merge_weight
from gradscope.trainer.config import TrainConfig
from gradscope.trainer.launch import check_launch

if TYPE_CHECKING:
    from accelerate import Accelerator


@dataclass(frozen=True)
class Learner:
    """What an update changes, and what it is held against."""

    policy: Policy
    """The trained model itself, not what DistributedDataParallel makes of it."""
    updater: Updater
    optimizer: torch.optim.Optimizer
    reference: nn.Module | None
    """The policy before training; None: no KL, or the policy without its adapters."""
    adapters: Any | None
    """The PeftModel around the policy; None: all weights are trained."""
    computing: Callable[[], AbstractContextManager]
    """Precision and attention kernels of sampling and training."""

    @property
    def processes(self) -> Processes:
        return self.updater.processes

    def statistics(self, batch: TokenBatch) -> TokenStatistics:
        """log π, log(1−π) and entropy of the batch's response tokens under the policy as it is."""
        return self._statistics(self.updater.model, batch, self.processes)

    def statistics_alone(self, batch: TokenBatch) -> TokenStatistics:
        """The same, by this process while the others wait."""
        return self._statistics(self.policy.model, batch, ALONE)

    def reference_logprobs(self, batch: TokenBatch) -> Tensor:
        """log π_ref of the batch's response tokens [B, S]."""
        if self.reference is not None:
            return self._statistics(self.reference, batch, self.processes).logprob
        with self.adapters.disable_adapter():
            return self._statistics(self.updater.model, batch, self.processes).logprob

    def _statistics(self, model: nn.Module, batch: TokenBatch, processes: Processes) -> TokenStatistics:
        size, device = self.updater.micro_batch_size, self.updater.device
        with self.computing():
            return batch_statistics(model, batch, micro_batch_size=size, device=device, processes=processes)

    def is_finite(self) -> bool:
        """Whether all trained weights are."""
        trained = [p.detach() for p in self.policy.model.parameters() if p.requires_grad]
        return bool(nn.utils.get_total_norm(trained, float("inf")).isfinite())

    def set_learning_rate(self, value: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = value

    def sync(self, sampler: Sampler) -> None:
        """Let it sample with the weights as they are now."""
        sampler.sync(self.weights())

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter by its name in the model, adapters merged in; tied ones once."""
        layers = {} if self.adapters is None else adapted_layers(self.policy.model)
        for name, parameter in self.policy.model.named_parameters():
            owner, _, leaf = name.rpartition(".base_layer.")
            if owner in layers:
                yield f"{owner}.{leaf}", merge_weight(layers[owner], leaf, parameter.detach())
            elif ".lora_" not in name:
                yield name, parameter.detach()


def build_learner(config: TrainConfig, accelerator: Accelerator, checkpoint: Path | None = None) -> Learner:
    """Load the policy of the configuration, or of a checkpoint of this run, and make all that trains it.

    Raises InputError for a way of launching that the trainer does not know.
    """
    check_launch(config, accelerator)
    how = {"dtype": "float32", "device": str(accelerator.device), "chat_template_kwargs": config.chat_template_kwargs}
    trained = checkpoint is not None and config.lora_rank is None
    policy = load_policy(checkpoint if trained else find_checkpoint(config.model), **how)
    model = policy.model
    _remove_noise(model)
    adapters = None if config.lora_rank is None else add_adapters(model, config, checkpoint)
    if config.gradient_checkpointing:
        _checkpoint_activations(model)
    wrapped = accelerator.prepare_model(model) if accelerator.num_processes > 1 else model
    # Named, so that the saved state says whose moments it holds.
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=config.learning_rate, weight_decay=config.weight_decay)
    updater = Updater(
        wrapped,
        optimizer,
        accelerator.device,
        config.micro_batch_size,
        config.max_grad_norm,
        Processes(accelerator.process_index, accelerator.num_processes),
        accelerator.no_sync,
    )
    reference = None
    if config.kl_coef > 0 and adapters is None:
        reference = load_policy(find_checkpoint(config.model), **how).model.requires_grad_(False)
    own = partial(computing, accelerator.device, mixed=config.precision == "bfloat16")
    return Learner(policy, updater, optimizer, reference, adapters, own)


@contextmanager
def computing(device: torch.device, *, mixed: bool) -> Iterator[None]:
    """How a step computes, backward passes included: activation checkpointing must find the kernels of the first run.

    mixed: under autocast to bfloat16.
    """
    with torch.autocast(device.type, torch.bfloat16) if mixed else nullcontext(), without_cudnn_attention():
        yield


def _remove_noise(model: nn.Module) -> None:
    """No dropout, no jitter, in no mode: π_old and π_θ must differ by the weights alone.

    Some modules keep the share that they drop as a number, some read the configuration each time.
    """
    for holder in [model.config.get_text_config(), *model.modules()]:
        for name, value in list(vars(holder).items()):
            if isinstance(value, float) and ("drop" in name or "jitter" in name):
                setattr(holder, name, 0.0)
        if isinstance(holder, nn.modules.dropout._DropoutNd):
            holder.p = 0.0


@torch.no_grad()
def _checkpoint_activations(model: nn.Module) -> None:
    """Recompute activations in the backward pass, which transformers does in training mode alone."""
    ids = torch.arange(8, device=model.device)[None] % model.config.get_text_config().vocab_size
    wanted = model(input_ids=ids, use_cache=False).logits
    try:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    except ValueError as error:
        raise InputError(f"{type(model).__name__} knows no gradient_checkpointing; leave it out") from error
    model.train()
    if not torch.allclose(model(input_ids=ids, use_cache=False).logits, wanted, rtol=1e-3, atol=1e-4):
        raise InputError(
            f"{type(model).__name__} computes something else in training mode, which gradient_checkpointing needs; "
            "leave it out"
        )
