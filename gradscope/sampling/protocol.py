"""Sampling responses from a policy: one protocol, one file per engine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sample:
    """One sampled response."""

    response_ids: list[int]
    """At least one token, including the final stop token if one was sampled."""
    logprobs: list[float]
    """log π in nats of each token, at the sampling temperature, under the policy that sampled it."""
    finished: bool
    """True if a stop token ended it, False if the length limit did."""


@runtime_checkable
class Sampler(Protocol):
    """Samples from the full softmax(logits / temperature), without truncation (top-p, top-k)."""

    def sample(
        self,
        prompt_ids: list[list[int]],
        *,
        n: int,
        temperature: float,
        max_new_tokens: int,
        generator: torch.Generator,
        greedy: bool = False,
    ) -> list[list[Sample]]:
        """Sample n responses to each prompt, in the order of the prompts.

        greedy: always take the likeliest token; `temperature` then only affects the log-probabilities (NaN from vLLM
        unless it is 1).
        """
        ...

    def sync(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load new weights into the sampler: every parameter by its name in the model, unsharded.

        A sampler that shares the trained model's own weights has nothing to do.
        """
        ...

    def close(self) -> None:
        """Free the sampler's own resources; it cannot sample afterwards."""
        ...
