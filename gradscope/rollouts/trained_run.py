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
    other_loss: str | None = None
    """What makes the trained loss another than Eq. 1's, so that the log's advantages are made of the weights of the
    trainer's own backward pass; None: nothing."""
    left_out: tuple[str, ...] = ()
    """What the loss has a gradient through beside the kept tokens' log π, which no token's weight contains."""

    @property
    def words(self) -> str | None:
        """What to know of the weights of another loss; None: nothing."""
        if self.other_loss is None:
            return None
        told = f"the loss is the trainer's own ({self.other_loss}): weights are those of its backward pass"
        return told + (f", without its gradient through {' and '.join(self.left_out)}" if self.left_out else "")

    def trains(self, name: str) -> bool:
        """Return whether a parameter is trained, as far as logged."""
        return name not in self.frozen if self.trained is None else name in self.trained
