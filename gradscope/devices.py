"""Devices and precisions by name."""

from __future__ import annotations

import ctypes
import os

import psutil
import torch

from gradscope.errors import InputError, first_line
from gradscope.processes import ALONE, Processes
from gradscope.upcasting import UPCAST

GRADIENT_SHARE = 1 / 6
"""Of the memory that is free: the budget of summed gradients, unless one is given."""
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}


def find_device(device: str | None) -> str:
    """The device, tried; a GPU where there is one, if none is named."""
    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=device).tolist()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise InputError(f"device {device!r} cannot be used: {first_line(error)}; give cpu, or leave it out") from error
    return device


def parse_dtype(dtype: str | torch.dtype | None, device: str) -> torch.dtype | str:
    """The dtype by its name; None: float32 on a CPU, elsewhere "auto", the checkpoint's own; so for what is upcast."""
    if dtype == UPCAST:
        return "auto"
    if dtype is None:
        return torch.float32 if torch.device(device).type == "cpu" else "auto"
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPES:
        raise InputError(f"dtype {dtype!r} is not one of {', '.join((*DTYPES, UPCAST))}")
    return DTYPES[dtype]


def free_memory(device: torch.device) -> int:
    """Bytes that are free on a GPU, or on the machine."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available


def gradient_budget(device: torch.device, processes: Processes = ALONE) -> int:
    """Bytes that summed gradients may take in each process, where nobody says how many: one number for all.

    All processes call it together; those on a CPU share its memory.
    """
    own = int(GRADIENT_SHARE * free_memory(device) / (processes.count if device.type == "cpu" else 1))
    return min(processes.gather([own]))


def return_freed_memory() -> None:
    """Give the system back what the C library keeps of freed memory, where it can be asked to, as glibc can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)
