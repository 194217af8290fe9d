"""Several processes that measure together, each with the whole policy and a part of the responses.

    accelerate launch --multi_gpu --num_processes 8 -m gradscope measure …                    one GPU each
    accelerate launch --multi_gpu --num_processes 2 -m gradscope measure --device cpu …       the same without GPUs

A response's rows are the same whoever measures it, so files are all that is shared for the table. Of summed gradients,
each process makes those of its share of the prompts, and all add them up part by part.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch

from gradscope.errors import InputError
from gradscope.policy.loading import find_device
from gradscope.runs import ALONE, Processes

PATIENCE = timedelta(hours=12)
"""For the slowest of several processes; one that has failed ends them all at once."""


def join_launch(device: str | None) -> tuple[Processes, str | None]:
    """Return (this process's place among those that were launched, the device that it works on).

    Alone, if nothing was launched: the device is the one given. Raises InputError for a launch that shards weights, and
    for a device that several processes cannot have.
    """
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        return ALONE, device
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        raise InputError("weights in shards (FSDP) are not measured; launch with --multi_gpu: whole weights in each")
    on_cpu = device is not None and torch.device(find_device(device)).type == "cpu"
    if not on_cpu and device not in (None, "cuda"):
        raise InputError(f"--device is {device} for {count} processes; leave it out, each takes a GPU of its own")
    if not on_cpu and not torch.cuda.is_available():
        raise InputError(f"{count} processes were started, and there is no GPU to share; give --device cpu")
    from accelerate import PartialState

    state = PartialState(cpu=on_cpu, timeout=PATIENCE)
    if state.num_processes != count:
        raise InputError(f"{count} processes were started and {state.num_processes} joined; launch with --multi_gpu")
    return Processes(state.process_index, state.num_processes), str(state.device)
