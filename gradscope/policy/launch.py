"""Several processes that measure together, each with the whole policy and a share of the responses.

    accelerate launch --multi_gpu --num_processes 8 -m gradscope measure …                    one GPU each
    accelerate launch --multi_gpu --num_processes 2 -m gradscope measure --device cpu …       the same without GPUs

A response's rows do not depend on the process that measures it, so the table is shared only through files. For summed
gradients, each process computes those of its share of the prompts, and all are added up piece by piece.
"""

from __future__ import annotations

import os

import torch

from gradscope.errors import InputError
from gradscope.policy.loading import find_device
from gradscope.runs import ALONE, ALONE_AGAIN, Processes, join_processes, launched


def join_launch(device: str | None) -> tuple[Processes, str | None]:
    """Return this process's rank among those launched, and its device.

    Without a launch, the process is alone, with the given device. Raises InputError for a launch that shards weights,
    or a device that several processes cannot share.
    """
    count = launched()
    if count == 1:
        return ALONE, device
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        raise InputError("sharded weights (FSDP) cannot be measured; launch with --multi_gpu")
    on_cpu = device is not None and torch.device(find_device(device)).type == "cpu"
    if not on_cpu and device not in (None, "cuda"):
        raise InputError(f"--device is {device} for {count} processes; leave it out, so that each takes a GPU")
    if not on_cpu and not torch.cuda.is_available():
        raise InputError(
            f"WORLD_SIZE={count} announces {count} processes, but there is no GPU; give --device cpu, or {ALONE_AGAIN}"
        )
    from accelerate import PartialState

    join_processes("gloo" if on_cpu else "nccl")
    state = PartialState(cpu=on_cpu)
    if state.num_processes != count:
        raise InputError(f"{count} processes were started, but {state.num_processes} joined; launch with --multi_gpu")
    return Processes(state.process_index, state.num_processes), str(state.device)
