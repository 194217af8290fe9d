"""The policy that is trained, its optimizer, its reference, and how several processes share them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gradscope.batch import TokenBatch
from gradscope.batch_logprobs import batch_statistics
from gradscope.errors import InputError
from gradscope.logprobs import TokenStatistics
from gradscope.models import Policy, load_policy
from gradscope.processes import Processes
from gradscope.steps import Updater
from gradscope.trainer.config import TrainConfig

if TYPE_CHECKING:
    from accelerate import Accelerator

ADAPTER = "adapter"
"""Folder of a checkpoint that holds the low-rank adapters by themselves; the checkpoint's own weights are merged."""


@dataclass(frozen=True)
class Learner:
    """What an update changes, and what it is held against."""

    policy: Policy
    """The model itself, unwrapped: what samples, and what is saved."""
    updater: Updater
    optimizer: torch.optim.Optimizer
    """Unwrapped."""
    reference: nn.Module | None
    """The policy before training; None: no KL, or the policy itself without its adapters."""
    adapters: Any | None
    """The PeftModel around the policy; None: all weights are trained."""
    autocast: Callable[[], AbstractContextManager]
    """Precision of forward passes."""

    @property
    def processes(self) -> Processes:
        return self.updater.processes

    def statistics(self, batch: TokenBatch) -> TokenStatistics:
        """log π, log(1−π) and entropy of the batch's response tokens under the policy as it is."""
        return self._statistics(self.updater.model, batch)

    def reference_logprobs(self, batch: TokenBatch) -> Tensor:
        """log π_ref of the batch's response tokens [B, S]."""
        if self.reference is not None:
            return self._statistics(self.reference, batch).logprob
        with self.adapters.disable_adapter():
            return self._statistics(self.updater.model, batch).logprob

    def _statistics(self, model: nn.Module, batch: TokenBatch) -> TokenStatistics:
        size, device = self.updater.micro_batch_size, self.updater.device
        with self.autocast():
            return batch_statistics(model, batch, micro_batch_size=size, device=device, processes=self.processes)

    def set_learning_rate(self, value: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = value

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter by its name in the model, whole, adapters merged in; tied ones once."""
        layers = {} if self.adapters is None else _adapted_layers(self.policy.model)
        for name, parameter in self.policy.model.named_parameters():
            owner, _, leaf = name.rpartition(".base_layer.")
            if owner in layers:
                yield f"{owner}.{leaf}", _merged(layers[owner], leaf, parameter.detach())
            elif ".lora_" not in name:
                whole = parameter.detach()
                yield name, whole.full_tensor() if hasattr(whole, "full_tensor") else whole


def build_learner(config: TrainConfig, accelerator: Accelerator, checkpoint: Path | None = None) -> Learner:
    """Load the policy of the configuration, or of a checkpoint of this run, and make all that trains it."""
    device = accelerator.device
    start = checkpoint if checkpoint is not None and config.lora_rank is None else config.model
    policy = load_policy(start, dtype="float32", device=str(device))
    model = policy.model
    _no_dropout(model)
    needs_reference = config.kl_coef > 0
    reference = None
    if needs_reference and config.lora_rank is None:
        original = model if checkpoint is None else load_policy(config.model, dtype="float32", device=str(device)).model
        reference = copy.deepcopy(original).requires_grad_(False).eval()
    adapters = None if config.lora_rank is None else _add_adapters(model, config, checkpoint)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()  # recomputation is done in training mode alone; there is no dropout left to switch on
    # Named, so that the saved state says whose moments it holds.
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=config.learning_rate, weight_decay=config.weight_decay)
    wrapped, stepper, no_sync = model, optimizer, lambda model: nullcontext()
    if accelerator.num_processes > 1:
        wrapped, stepper = accelerator.prepare(model, optimizer)
        no_sync = accelerator.no_sync
    mixed = config.precision == "bfloat16"

    def autocast() -> AbstractContextManager:
        return torch.autocast(device.type, torch.bfloat16) if mixed else nullcontext()

    updater = Updater(
        wrapped,
        stepper,
        device,
        config.micro_batch_size,
        config.max_grad_norm,
        Processes(accelerator.process_index, accelerator.num_processes),
        no_sync,
    )
    return Learner(policy, updater, optimizer, reference, adapters, autocast)


def _no_dropout(model: nn.Module) -> None:
    """π_old and π_θ must differ by the weights alone."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout", "activation_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def _add_adapters(model: nn.Module, config: TrainConfig, checkpoint: Path | None) -> Any:
    try:
        from peft import LoraConfig, PeftModel, get_peft_model
    except ImportError as error:
        raise InputError("lora_rank needs peft, which is not installed: pip install 'gradscope[lora]'") from error

    if checkpoint is not None:
        return PeftModel.from_pretrained(model, checkpoint / ADAPTER, is_trainable=True)
    settings = LoraConfig(
        r=config.lora_rank, lora_alpha=config.lora_alpha, target_modules="all-linear", lora_dropout=0.0
    )
    return get_peft_model(model, settings)


def _adapted_layers(model: nn.Module) -> dict[str, Any]:
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


def _merged(layer: Any, leaf: str, parameter: Tensor) -> Tensor:
    """The layer's weight with its adapter added; a bias is as it is."""
    return parameter + layer.get_delta_weight("default").detach() if leaf == "weight" else parameter
