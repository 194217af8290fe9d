"""What a log says of the run that trained on its responses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Precision = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class TrainedRun:
    """What a log says of the run besides its responses."""

    precision: Precision | None = None
    """Of the trainer's passes; None: not logged."""
    trained: frozenset[str] | None = None
    """Names of the parameters that are trained; None: all but the frozen ones."""
    frozen: frozenset[str] = frozenset()
    """Names of the parameters that are not trained, if `trained` is None."""

    def trains(self, name: str) -> bool:
        """Return whether a parameter is trained, as far as logged."""
        return name not in self.frozen if self.trained is None else name in self.trained
