"""Limits on products with the Jacobian, and how they report progress."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from gradscope.errors import InputError
from gradscope.policy import gradient_budget
from gradscope.runs import ALONE, SILENT, Processes, Progress, settle_progress


@dataclass(frozen=True)
class Resources:
    """The memory, processes and progress of a computation."""

    vectors: int | None = None
    """Bytes for vectors as long as the parameters; None: a sixth of what is free."""
    activations: int | None = None
    """Bytes that one batched backward pass of `row_norms` may carry; None: 1 GiB, on a GPU 4."""
    micro_batch: int = 8
    """Most responses in one forward pass. Fewer go together where their logits would take too much memory."""
    processes: Processes = ALONE
    """Processes that share the work; all get the result."""
    deadline: float | None = None
    """When `gram` stops, on the clock of `time.monotonic`: until then it takes groups in random order, and a comparison
    takes weightings in turn."""
    progress: bool | Progress = SILENT
    """Where progress is reported; True: to stderr."""

    def __post_init__(self) -> None:
        for name in ("activations", "micro_batch"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise InputError(f"{name} is {value}; give 1 or more")

    def settle(self, device: torch.device) -> Resources:
        """Fill in defaults for a model on this device. All processes call it together."""
        vectors = gradient_budget(device, self.processes) if self.vectors is None else self.vectors
        activations = (1 if device.type == "cpu" else 4) << 30 if self.activations is None else self.activations
        return replace(self, vectors=vectors, activations=activations, progress=settle_progress(self.progress))


def latest_end(begun: float, deadline: float) -> float:
    """Return when current work is abandoned: after the deadline, by a quarter of the allotted time."""
    return deadline + max(0.0, deadline - begun) / 4
