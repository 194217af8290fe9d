"""Losses that a trainer may have computed: ways of averaging, each also with a common error.

Eq. 2 gives −Σ_t c_t·w_t·∇ log π_t. An aggregation specifies c_t, and a fault changes weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gradscope.errors import InputError
from gradscope.gradients import TokenJacobian
from gradscope.objective import LossSettings, batch_weights
from gradscope.rollouts import TokenBatch

AGGREGATIONS = {
    "logged": "the loss as recorded in the log",
    "token-mean": "the mean over all tokens of the batch",
    "sequence-mean": "the mean over responses of the mean over their tokens",
    "micro-batches": "the mean over micro-batches of the mean over their tokens",
    "processes": "the mean over processes of the mean over their tokens",
}
SHIFTS = (1, -1, 2, -2, 3, -3)
"""Distances by which a mask may be late; negative: early."""
FAULTS = {
    "mask-late": "each token with the weight of the token before it",
    "mask-early": "each token with the weight of the token after it",
    "mask-late-2": "each token with the weight of the token two before it",
    "mask-early-2": "each token with the weight of the token two after it",
    "mask-late-3": "each token with the weight of the token three before it",
    "mask-early-3": "each token with the weight of the token three after it",
    "no-temperature": "with log π at temperature 1",
    "no-kl": "without KL",
    "kl-sign": "with the opposite sign of KL",
    "last-token": "without each response's last token (EOS)",
    "last-token-uncounted": "without each response's last token (EOS), in denominators either",
    "first-token": "without each response's first token",
    "first-token-uncounted": "without each response's first token, in denominators either",
    "response-missing": "without one of the responses",
    "micro-batch-missing": "without one of the micro-batches",
    "process-missing": "without one of the processes",
}


@dataclass(frozen=True)
class Reading:
    """A loss whose gradient a trainer may have computed."""

    aggregation: str
    """One of AGGREGATIONS."""
    fault: str | None = None
    """One of FAULTS; None: none."""
    part: int | None = None
    """Index of the missing response, micro-batch or process; None: none is missing."""

    @property
    def name(self) -> str:
        """The aggregation or the fault; both if the fault is of another aggregation than the mean over tokens."""
        if self.fault is None:
            return self.aggregation
        return self.fault if self.aggregation == "token-mean" else f"{self.fault} ({self.aggregation})"

    def __str__(self) -> str:
        told = AGGREGATIONS[self.aggregation]
        if self.fault is None:
            return told
        return f"{told}, {FAULTS[self.fault]}" + ("" if self.part is None else f", number {self.part}")


@dataclass(frozen=True)
class TokenRows:
    """Where a batch's kept tokens are, in order."""

    response: Int[Tensor, " K"]
    parts: Mapping[str, Int[Tensor, " B"]]
    """Each response's micro-batch (numbered across processes) and process, as far as known."""

    @classmethod
    def of(cls, batch: TokenBatch, micro_batch: int | None, processes: int | None) -> TokenRows:
        """Find them; see `audit` for the arguments."""
        if processes is not None and not (processes > 0 and len(batch) % processes == 0):
            raise InputError(
                f"{len(batch)} responses do not divide among {processes} processes; give the actual number"
            )
        rows, found = torch.arange(len(batch)), {}
        if processes is not None:
            found["processes"] = rows // (len(batch) // processes)
        elif batch.process_ids is not None:
            found["processes"] = batch.process_ids.long()
        if micro_batch is not None:
            found["micro-batches"] = rows // micro_batch
        elif batch.micro_batch_ids is not None:
            own = batch.micro_batch_ids.long()
            found["micro-batches"] = own + (own.max() + 1) * found.get("processes", torch.zeros_like(own))
        return cls(batch.response_mask.nonzero()[:, 0], found)

    def ends(self, which: str) -> Bool[Tensor, " K"]:
        """Return which tokens are the first, or the last, of their response."""
        change, edge = self.response[1:] != self.response[:-1], torch.ones(1, dtype=torch.bool)
        return torch.cat([edge, change] if which == "first" else [change, edge])

    def divisors(self, counted: Bool[Tensor, " K"] | None = None) -> dict[str, Float[Tensor, " K"]]:
        """Return 1 / c_t by aggregation, infinite for tokens that are not counted (None: all are)."""
        counted = torch.ones_like(self.response, dtype=torch.bool) if counted is None else counted
        found = {"token-mean": torch.zeros_like(self.response), "sequence-mean": self.response}
        of_tokens = {name: own[self.response] for name, own in self.parts.items()}
        found |= {name: own for name, own in of_tokens.items() if len(own.unique()) > 1}
        divisors = {}
        for name, part in found.items():
            counts = torch.bincount(part[counted], minlength=int(part.max()) + 1).double()
            divisors[name] = torch.where(counted, counts[part] * len(part.unique()), torch.inf)
        return divisors

    def shift(self, weights: Float[Tensor, " K"], by: int) -> Float[Tensor, " K"]:
        """Give each token the weight of the token `by` before it, in its response, or 0."""
        rows = torch.arange(len(weights))
        source = (rows - by).clamp(0, len(rows) - 1)
        moved = (source == rows - by) & (self.response[source] == self.response)
        return torch.where(moved, weights[source], 0.0)


@dataclass(frozen=True)
class Readings:
    """The weights c_t·w_t of every reading of a batch's loss, in float64."""

    J: TokenJacobian
    loss: LossSettings
    rows: TokenRows

    def plain(self) -> dict[Reading, Float[Tensor, " K"]]:
        """Return those without a fault."""
        return {Reading(name): own for name, own in self._aggregate(self._weigh(self.J, self.loss)).items()}

    def faulty(self, aggregation: str) -> Iterator[tuple[Reading, Float[Tensor, " K"]]]:
        """Yield those of an aggregation with a fault other than the temperature's and missing parts."""
        weights = self._weigh(self.J, self.loss)
        sound = self._aggregate(weights)[aggregation]
        for by in SHIFTS:
            name = ("mask-late" if by > 0 else "mask-early") + f"-{abs(by)}" * (abs(by) > 1)
            yield Reading(aggregation, name), self.rows.shift(sound, by)
        if self.loss.kl_coef and self.J.batch.ref_logprobs is not None:
            policy = self._weigh(self.J, replace(self.loss, kl_coef=0.0))
            yield Reading(aggregation, "no-kl"), self._aggregate(policy)[aggregation]
            yield Reading(aggregation, "kl-sign"), self._aggregate(2 * policy - weights)[aggregation]
        for which in ("last", "first"):
            counted = ~self.rows.ends(which)
            yield Reading(aggregation, f"{which}-token"), sound * counted
            if counted.any() and aggregation != "logged":  # whose denominators are the log's
                divisors = self.rows.divisors(counted)
                yield Reading(aggregation, f"{which}-token-uncounted"), weights / divisors[aggregation]

    def at_temperature_1(self, unscaled: TokenJacobian, aggregation: str) -> Float[Tensor, " K"]:
        """Return those of an aggregation whose log π is at temperature 1. unscaled: the Jacobian there."""
        return self._aggregate(self._weigh(unscaled, self.loss))[aggregation]

    def parts(self) -> dict[str, Int[Tensor, " K"]]:
        """Return the parts that may be missing: each token's, by fault."""
        found = {"response-missing": self.rows.response}
        names = {"micro-batches": "micro-batch-missing", "processes": "process-missing"}
        return found | {names[name]: own[self.rows.response] for name, own in self.rows.parts.items()}

    def _weigh(self, J: TokenJacobian, loss: LossSettings) -> Float[Tensor, " K"]:
        """Return w_t of every kept token."""
        batch = replace(J.batch, loss_scales=None)
        return J.kept(batch_weights(J.statistics.logprob, batch, loss, num_tokens=batch.num_tokens).total).double()

    def _aggregate(self, weights: Float[Tensor, " K"]) -> dict[str, Float[Tensor, " K"]]:
        scales, found = self.J.batch.loss_scales, {}
        if scales is not None:
            found["logged"] = weights * scales.double()[self.rows.response] / len(weights)
        return found | {name: weights / divisor for name, divisor in self.rows.divisors().items()}
