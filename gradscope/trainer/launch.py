"""How a run was launched: alone, with whole weights in several processes (DDP), or with shards of them (FSDP 2).

    accelerate launch --multi_gpu --num_processes 8 -m gradscope train …                    whole weights
    accelerate launch --multi_gpu --num_processes 2 -m gradscope train --device cpu …       the same without GPUs
    accelerate launch --use_fsdp --fsdp_version 2 --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP …             shards

`--cpu` starts one process only (or needs MPI). What accelerate knows of FSDP and this trainer has not been tried with,
is refused.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gradscope.errors import InputError
from gradscope.policy import Policy, find_device, load_policy
from gradscope.trainer.config import TrainConfig

if TYPE_CHECKING:
    from accelerate import Accelerator

PATIENCE = timedelta(hours=4)
"""For the slowest of several processes: one may sample or measure for long while the others wait."""

GROUPS: list[torch.distributed.ProcessGroup] = []
"""Process groups of this process, kept: if the reducer of DDP were the last that has one, it would end its threads,
holding the interpreter's lock for which one that still frees a tensor may wait, and so wait for ever."""


def make_accelerator(config: TrainConfig, out: Path) -> Accelerator:
    """Accelerate's view of device, processes and trackers."""
    from accelerate import Accelerator, InitProcessGroupKwargs
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

    here = {str(getattr(name, "value", name)) for name in get_available_trackers()}
    if missing := [name for name in config.trackers if name not in here]:
        known = "is not installed" if missing[0] in LOGGER_TYPE_TO_CLASS else "is no tracker that accelerate knows"
        raise InputError(f"tracker {missing[0]!r} {known}; at hand: {', '.join(sorted(here)) or 'none'}")
    device = None if config.device is None else torch.device(find_device(config.device))
    on_cpu = device is not None and device.type == "cpu"
    if device is not None and not on_cpu:
        torch.cuda.set_device(device)
    accelerator = Accelerator(
        cpu=on_cpu,
        mixed_precision="no",  # the configuration's own precision decides
        log_with=list(config.trackers) or None,
        project_dir=str(out),
        kwargs_handlers=[InitProcessGroupKwargs(timeout=PATIENCE)],
    )
    if accelerator.num_processes > 1:
        GROUPS.append(torch.distributed.group.WORLD)
    return accelerator


def check_launch(config: TrainConfig, accelerator: Accelerator) -> None:
    """Raise InputError for a launch that is none of these three, or that says something else than the configuration."""
    kind = accelerator.distributed_type.value
    asked = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if asked not in ("no", {"float32": "no", "bfloat16": "bf16"}[config.precision]):
        raise InputError(
            f"accelerate was launched with mixed_precision {asked} and precision is {config.precision}; give "
            "--precision, which decides, and launch with the same or none"
        )
    if accelerator.num_processes == 1 and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InputError(
            f"{os.environ['WORLD_SIZE']} processes were started, and there is no GPU to share; give --device cpu"
        )
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true" and kind != "FSDP":
        raise InputError("accelerate makes shards (FSDP) for several GPUs only; launch with --multi_gpu, or without")
    if kind == "FSDP":
        _check_shards(config, accelerator)
    elif kind not in ("NO", "MULTI_GPU", "MULTI_CPU"):
        raise InputError(f"accelerate was launched for {kind}; launch with --multi_gpu, or --use_fsdp --fsdp_version 2")


def _check_shards(config: TrainConfig, accelerator: Accelerator) -> None:
    plugin = accelerator.state.fsdp_plugin
    offloads = type(plugin.cpu_offload).__name__ == "CPUOffloadPolicy"
    refused = [
        (not accelerator.is_fsdp2, "--fsdp_version 1", "give 2"),
        (accelerator.is_fsdp2 and offloads, "--fsdp_offload_params", "leave it out"),
        (plugin.activation_checkpointing, "--fsdp_activation_checkpointing", "give --gradient-checkpointing to train"),
        (config.gradients_every is not None, "--gradients-every", "launch with --multi_gpu, or leave it out"),
        (config.lora_rank is not None, "--lora-rank", "adapters need no shards: launch with --multi_gpu"),
    ]
    for given, flag, advice in refused:
        if given:
            raise InputError(f"{flag} does not go with weights in shards (FSDP) here; {advice}")


def load_whole(path: str | Path, accelerator: Accelerator, **how: Any) -> Policy:
    """A policy in float32 on this process's device; of itself, accelerate fills one for FSDP in one process alone."""
    from accelerate.utils import patch_environment

    with patch_environment(fsdp_cpu_ram_efficient_loading="false"):
        return load_policy(path, dtype="float32", device=str(accelerator.device), **how)


def share_model(model: nn.Module, config: TrainConfig, accelerator: Accelerator) -> nn.Module:
    """The model as it is called: with gradients that several processes average, or in shards, itself, by FSDP."""
    if not accelerator.is_fsdp2:
        return accelerator.prepare_model(model) if accelerator.num_processes > 1 else model
    from accelerate.utils import fsdp2_prepare_model
    from torch.distributed.fsdp import MixedPrecisionPolicy

    plugin = accelerator.state.fsdp_plugin
    plugin.cpu_ram_efficient_loading = False
    # bfloat16 is gathered and computed with; shards, and sums of gradients, stay float32.
    mixed = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if config.precision == "bfloat16" else None
    plugin.mixed_precision_policy = mixed
    return fsdp2_prepare_model(accelerator, model)
