"""Low-rank adapters (LoRA, by peft): put around a policy's linear layers, and merged into plain weights again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradscope.errors import InputError
from gradscope.trainer.config import TrainConfig

ADAPTER = "adapter"
"""Folder of a checkpoint that holds the adapters by themselves; the checkpoint's own weights are merged."""


def add_adapters(model: nn.Module, config: TrainConfig, checkpoint: Path | None) -> Any:
    """The PeftModel of new adapters in this model, or of a checkpoint's; they alone are trained.

    Raises InputError without peft, for a mixture of experts, and for a rank above the model's width.
    """
    try:
        from peft import LoraConfig, PeftModel, get_peft_model
    except ImportError as error:
        raise InputError("lora_rank needs peft, which is not installed: pip install 'gradscope[lora]'") from error
    from transformers.pytorch_utils import Conv1D

    if checkpoint is not None:
        return PeftModel.from_pretrained(model, checkpoint / ADAPTER, is_trainable=True, local_files_only=True)
    width = getattr(model.config.get_text_config(), "hidden_size", config.lora_rank)
    if config.lora_rank > width:
        raise InputError(f"lora_rank is {config.lora_rank} and the policy is {width} wide; give {width} at most")
    settings = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        target_modules="all-linear",
        lora_dropout=0.0,
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),  # GPT-2's weights lie transposed
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)  # the adapters' first factors are drawn at random
        adapters = get_peft_model(model, settings)
    if any(type(layer).__name__ == "ParamWrapper" for layer in adapted_layers(model).values()):
        raise InputError(
            f"{type(model).__name__} is a mixture of experts: their adapters cannot be merged here; leave lora_rank out"
        )
    return adapters


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    """The layers that have adapters, by the names of the layers in the plain model."""
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


@torch.no_grad()
def merge_weight(layer: Any, leaf: str, parameter: Tensor) -> Tensor:
    """The layer's weight with its adapter added; a bias is as it is."""
    with torch.autocast(parameter.device.type, enabled=False):
        return parameter + layer.get_delta_weight("default") if leaf == "weight" else parameter
