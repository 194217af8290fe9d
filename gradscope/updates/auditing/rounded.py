"""Token gradients of log π that a trainer computes in half precision from the logits on, and in float32 before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gradscope.gradients import TokenJacobian, Vectors
from gradscope.objective import TokenStatistics
from gradscope.updates.auditing.faults import HALF

ROUNDED = {f"{what}-{name}": name for what in ("logits", "log-softmax", "logprobs") for name in HALF}
"""Faults of this kind → the half precision."""


class RoundedJacobian(TokenJacobian):
    """The Jacobian of log π from logits that are rounded, and rounded itself if the fault is of log_softmax, or of it
    alone.

    Where the temperature differs among responses, that of the first is used for rounding.
    """

    def __init__(self, exact: TokenJacobian, fault: str) -> None:
        """fault: of ROUNDED."""
        super().__init__(exact.policy, exact.batch, exact.resources)
        self.dtype, self.whole = getattr(torch, ROUNDED[fault]), not fault.startswith("logits")
        self.alone = fault.startswith("logprobs")

    @property
    def statistics(self) -> TokenStatistics:
        with self._rounding():
            found = super().statistics
        return replace(found, logprob=self._round(found.logprob)) if self.whole else found

    def vjp(self, weights: Float[Tensor, "R K"], of: Any = "logprob") -> Vectors:
        """Compute it with weights that are rounded, too, as the backward pass of log_softmax has them."""
        with self._rounding():
            return super().vjp(self._round(weights) if self.whole else weights, of)

    def _round(self, values: Tensor) -> Tensor:
        return values.to(self.dtype).to(values.dtype)

    @contextmanager
    def _rounding(self) -> Iterator[None]:
        """Round what the model's head returns."""
        if self.alone:
            yield
            return
        at = float(self.batch.temperature[0])

        def leave(_: nn.Module, __: tuple[Tensor, ...], logits: Tensor) -> Tensor:
            rounded = logits.to(self.dtype) / at
            return at * (rounded.log_softmax(-1) if self.whole else rounded).to(logits.dtype)

        hook = self.model.get_output_embeddings().register_forward_hook(leave)
        try:
            yield
        finally:
            hook.remove()
