"""How a run was launched: alone, or in several processes that each have the whole weights (DDP).

    accelerate launch --multi_gpu --num_processes 8 -m gradscope train …                    one GPU each
    accelerate launch --multi_gpu --num_processes 2 -m gradscope train --device cpu …       the same without GPUs

`--cpu` starts one process only (or needs MPI).
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from gradscope.errors import InputError
from gradscope.policy import find_device
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
    """Raise InputError for a launch that is none of these, or that says something else than the configuration."""
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
    if kind not in ("NO", "MULTI_GPU", "MULTI_CPU") or os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true":
        raise InputError("gradscope trains whole weights, in one process or several; launch with --multi_gpu")
