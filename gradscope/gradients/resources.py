"""What products with the Jacobian may take, and how they tell how far they are: settled once, passed whole."""

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
    """Share the work; every process gets the result."""
    deadline: float | None = None
    """When `gram` ends, on the clock of `time.monotonic`: groups come in random order, as many as end by about then; of
    a comparison, as many weightings."""
    progress: bool | Progress = SILENT
    """Where stages are reported; True: on stderr."""

    def __post_init__(self) -> None:
        for name in ("activations", "micro_batch"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise InputError(f"{name} is {value}; give 1 or more")

    def settle(self, device: torch.device) -> Resources:
        """Fill in what is None for a model on this device. All processes call it together."""
        vectors = gradient_budget(device, self.processes) if self.vectors is None else self.vectors
        activations = (1 if device.type == "cpu" else 4) << 30 if self.activations is None else self.activations
        return replace(self, vectors=vectors, activations=activations, progress=settle_progress(self.progress))


def latest_end(begun: float, deadline: float) -> float:
    """Return when what is at hand is given up: a quarter of its time after the deadline."""
    return deadline + max(0.0, deadline - begun) / 4
