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
    """Draws from the whole softmax(logits / temperature): truncated sampling (top-p, top-k) is not offered."""

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

        greedy: always the likeliest token; `temperature` then only says at which one the log-probabilities are (NaN
        from vLLM, which knows them at 1 alone).
        """
        ...

    def sync(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load new weights into the sampler: every parameter by its name in the model, unsharded.

        A sampler that shares the trained model's own weights has nothing to do.
        """
        ...

    def close(self) -> None:
        """Free what the sampler holds beside the policy; it cannot sample afterwards."""
        ...
