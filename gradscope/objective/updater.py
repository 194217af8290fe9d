"""From a batch to optimizer steps: the tokens of each step, gradient accumulation, clipping, the update.

The trainer and everything that analyses an update use this file, so that the measured step is the trained step.
Equations and Alg. 1 refer to arXiv:2505.12929.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from gradscope.errors import InputError
from gradscope.objective.batch_logprobs import (
    batch_statistics,
    empty_piece,
    gather_statistics,
    loss_logprobs,
    micro_batches,
    scored_loss_logprobs,
)
from gradscope.objective.equations import check_known
from gradscope.objective.logprobs import TokenStatistics
from gradscope.objective.loss import LossSettings, batch_loss, batch_weights, fill_unknown, weigh_step
from gradscope.objective.shared_prompts import can_pack
from gradscope.objective.weighting import Weighting
from gradscope.rollouts import TokenBatch
from gradscope.runs import ALONE, Processes

Number = int | float
Mask = Bool[Tensor, "B S"]


@dataclass(frozen=True)
class StepTokens:
    """The tokens of one optimizer step."""

    name: str
    """all, low, high, random-low (a random choice of as many as low), or random-high."""
    batch: TokenBatch
    """A mini-batch, with advantages and π_old; its response_mask keeps only the tokens of this step."""
    num_tokens: int
    """The loss's denominator: the response tokens of the whole mini-batch, in any step."""


@dataclass(frozen=True)
class Update:
    """All optimizer steps on one batch, in order, with their loss."""

    steps: list[StepTokens]
    batch: TokenBatch
    """The whole batch, with the advantages used in training."""
    settings: LossSettings
    match: LossSettings | None = None
    """If set, rescale each gradient to the norm it would have under these settings."""
    weighting: Weighting | None = None
    """Replacement for Eq. 2's policy weights in every step; None: Eq. 2's."""
    name: str = "trained"


class StepTotals(NamedTuple):
    """Sums over a step's micro-batches."""

    loss: float
    clipped_low: float
    clipped_high: float
    clipped_dual: float
    statistics: TokenStatistics | None = None
    """Statistics of the tokens before the step, if requested."""


@dataclass(frozen=True)
class StepResult:
    """The outcome of one optimizer step."""

    name: str
    """The step's name."""
    outcome: Literal["taken", "empty", "nonfinite"]
    """empty: no tokens, so no step (AdamW would still decay and coast); nonfinite: no step, gradient NaN or
    infinite."""
    loss: float
    """Loss of the step, divided by its denominator."""
    grad_norm: float
    """Gradient norm before clipping (after rescaling, with `match`); NaN for an empty step."""
    grad_norm_clipped: float
    """Gradient norm after clipping, as the optimizer saw it; NaN if no step was taken."""
    num_tokens: int
    """Number of tokens in the step."""
    clipped_low: int
    """Tokens with Â < 0 and π_θ/π_old < 1 − ε_low, which have no policy gradient."""
    clipped_high: int
    """Tokens with Â > 0 and π_θ/π_old > 1 + ε_high."""
    clipped_dual: int
    """Tokens with Â < 0 and π_θ/π_old > c."""
    statistics: TokenStatistics | None = None
    """Statistics of the tokens before the step, if requested."""

    @classmethod
    def empty(cls, part: StepTokens) -> StepResult:
        """Return the result of a step without tokens."""
        return cls(part.name, "empty", 0.0, math.nan, math.nan, 0, 0, 0, 0)


def split_steps(
    batch: TokenBatch,
    mini_batch_size: int,
    groups: Sequence[tuple[str, Mask]],
    *,
    schedule: Literal["sweep", "interleaved"] = "sweep",
) -> list[StepTokens]:
    """Make one step per group of tokens and mini-batch (Alg. 1, Lopti), with groups in the given order.

    sweep: the first group of all mini-batches, then the next group (L1 L2 H1 H2, the authors' code); interleaved: all
    groups of a mini-batch, then the next mini-batch (L1 H1 L2 H2, the other reading of the text).
    """
    parts = torch.arange(len(batch)).split(mini_batch_size)
    order = [(part, group) for group in groups for part in parts]
    if schedule == "interleaved":
        order = [(part, group) for part in parts for group in groups]
    steps = []
    for rows, (name, mask) in order:
        part = batch.select(rows)
        steps.append(StepTokens(name, replace(part, response_mask=part.response_mask & mask[rows]), part.num_tokens))
    return steps


def clip_scale(norm: float, max_grad_norm: Number | None) -> float:
    """Return the factor of gradient clipping, 1 without a maximum. Raises InputError if the norm is not finite."""
    if not math.isfinite(norm):
        raise InputError(f"the gradient's norm is {norm}, so no step is taken; find the response that causes it")
    return max_grad_norm / (norm + 1e-6) if max_grad_norm is not None and norm > max_grad_norm else 1.0


@dataclass(frozen=True)
class Updater:
    """A model and its optimizer: accumulates a step's gradient, clips it, and steps."""

    model: nn.Module
    """The model as it is called, wrapped by accelerate with several processes."""
    optimizer: Any
    """A torch optimizer, possibly wrapped by accelerate."""
    device: torch.device
    micro_batch_size: int
    """Most responses in one forward pass; affects only rounding."""
    max_grad_norm: Number | None = 1.0
    """Clip the gradient to this norm; None: no clipping."""
    processes: Processes = ALONE
    no_sync: Callable[[nn.Module], AbstractContextManager] = lambda model: nullcontext()
    """Context in which backward passes of several processes do not exchange gradients."""

    def step(
        self,
        part: StepTokens,
        settings: LossSettings,
        *,
        match: LossSettings | None = None,
        weighting: Weighting | None = None,
        score: bool = False,
    ) -> StepResult:
        """Take one optimizer step on the loss of its tokens under `settings`.

        No step is taken without tokens, or if the gradient is not finite.

        Args:
            match: before clipping, rescale the gradient to the norm that it has under these other settings.
            weighting: replaces the policy part of Eq. 2 by this weighting's w_t, under the policy before the step.
            score: return the statistics of the tokens before the step, from the same forward pass.
        """
        if part.batch.num_tokens == 0:
            self.optimizer.zero_grad()
            return StepResult.empty(part)
        wanted = None
        if match is not None:
            self.accumulate(part, match)
            wanted = self.grad_norm()
            self.optimizer.zero_grad()
        weighted = weighting is not None or settings.weighting is not None
        if weighted:
            weights = self._weigh(part, settings, weighting)
            part = replace(part, batch=replace(part.batch, advantages=weights))
            settings = replace(settings, weighting=None, kl_coef=0.0 if settings.is_whole else settings.kl_coef)
        totals = self.accumulate(part, settings, weighted=weighted, score=score)
        loss, counts = totals.loss, totals[1:4]
        norm = self.grad_norm()
        finite = all(map(math.isfinite, (loss, norm, norm if wanted is None else wanted)))
        if finite and wanted is not None:
            self._scale(wanted / norm if norm > 0 else 0.0)
            norm = wanted
        clipped = norm
        if finite:
            if (scale := clip_scale(norm, self.max_grad_norm)) != 1:
                self._scale(scale)
                clipped = norm * scale
            self.optimizer.step()
            # Autocast caches low-precision copies of the weights, which are stale after the step.
            torch.clear_autocast_cache()
        self.optimizer.zero_grad()
        result = (loss, norm, clipped if finite else float("nan"), part.batch.num_tokens, *map(int, counts))
        return StepResult(part.name, "taken" if finite else "nonfinite", *result, totals.statistics)

    def accumulate(
        self, part: StepTokens, settings: LossSettings, *, weighted: bool = False, score: bool = False
    ) -> StepTotals:
        """Add the gradient of the step's loss to `.grad`.

        Each micro-batch's loss has the whole mini-batch's denominator, so that they add up. weighted: the advantages
        are already the tokens' weights. score: also return the statistics of the tokens.
        """
        if not weighted and part.batch.advantages is not None:
            # Once, on the CPU: the losses do not check for NaN.
            check_known(part.batch.response_mask, advantages=part.batch.advantages)
        cut = micro_batches(part.batch, self.micro_batch_size, by_group=can_pack(self.model))
        pieces = self.processes.deal(cut, empty_piece(part.batch))
        totals, found = [torch.zeros(4, device=self.device)], []
        for index, (_, piece) in enumerate(pieces):
            last = index == len(pieces) - 1
            with nullcontext() if last else self.no_sync(self.model):
                if score:
                    logprobs, statistics = scored_loss_logprobs(self.model, piece)
                    found.append(statistics)
                else:
                    logprobs = loss_logprobs(self.model, piece)
                loss = _weighted_loss if weighted else batch_loss
                totals.append(self._backward(logprobs, piece.to(self.device), settings, part.num_tokens, loss))
        sums = self.processes.sum(torch.stack(totals).double().sum(0).float()).tolist()
        every = (self.model, part.batch, pieces, found, self.device, self.processes)
        return StepTotals(*sums, gather_statistics(*every) if score else None)

    def _weigh(self, part: StepTokens, settings: LossSettings, weighting: Weighting | None) -> Float[Tensor, "B S"]:
        """Compute w_t of the step's tokens under the current policy, by one more forward pass; without the scale.

        weighting: None: the settings'.
        """
        found = batch_statistics(
            self.model, part.batch, micro_batch_size=self.micro_batch_size, device=self.device, processes=self.processes
        )
        if weighting is None:
            own, known = replace(part.batch, loss_scales=None), {"num_tokens": 1, "entropy": found.entropy}
            return batch_weights(found.logprob, own, settings, **known).policy
        known = {"entropy": found.entropy, "sampler_logprobs": part.batch.sampler_logprobs}
        own = (part.batch.old_logprobs, part.batch.advantages, part.batch.response_mask)
        return weigh_step(weighting, found.logprob, *own, settings, **known)

    def _backward(
        self,
        logprobs: Float[Tensor, "b n"],
        piece: TokenBatch,
        settings: LossSettings,
        num_tokens: int,
        make_loss: Callable[..., Float[Tensor, ""]] = batch_loss,
    ) -> Float[Tensor, " 4"]:
        """Run the backward pass of the piece's loss; return the loss and the three counts, still on the device.

        A log π that is not finite makes the loss and the gradient so too, and the step is skipped; there is no check
        here, which would synchronise with the device.
        """
        loss = make_loss(logprobs, piece, settings, num_tokens=num_tokens, refuse_nan=False)
        broken = (~logprobs.isfinite()).any()
        loss = loss + logprobs.sum() * loss.new_zeros(()).masked_fill(broken, math.nan)
        # accelerate averages the gradients of the processes, but their losses must be summed: multiply by their count.
        (loss * self.processes.count).backward()
        counts = torch.stack(_count_clipped(logprobs.detach(), piece, settings)).masked_fill(broken, 0)
        return torch.cat([loss.detach()[None], counts.to(loss)])

    def grad_norm(self) -> float:
        """Return the L2 norm of the accumulated gradient over all parameters."""
        return float(nn.utils.get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None]))

    @torch.no_grad()
    def _scale(self, factor: float) -> None:
        torch._foreach_mul_([p.grad for p in self.model.parameters() if p.grad is not None], factor)


def _weighted_loss(
    logprobs: Float[Tensor, "b n"], piece: TokenBatch, settings: LossSettings, *, num_tokens: int, refuse_nan: bool
) -> Float[Tensor, ""]:
    """Return −Σ w_t·log π_t / N plus the loss's KL part; the batch's advantages hold the weights."""
    plain = replace(piece, advantages=torch.zeros_like(logprobs))
    kl = batch_loss(logprobs, plain, settings, num_tokens=num_tokens, refuse_nan=refuse_nan)
    products = torch.where(piece.response_mask, piece.advantages.to(logprobs) * logprobs, 0.0)
    if piece.loss_scales is not None:
        products = products * piece.loss_scales[:, None]
    return kl - products.sum() / num_tokens


def _count_clipped(logprobs: Float[Tensor, "b n"], piece: TokenBatch, settings: LossSettings) -> list[Int[Tensor, ""]]:
    """Count the tokens whose policy gradient is clipped away: low, high, dual."""
    clipped = batch_weights(logprobs, piece, settings, num_tokens=1, refuse_nan=False).clipped
    rose = logprobs > fill_unknown(piece.old_logprobs, logprobs)
    positive = piece.advantages > 0
    return [(clipped & which).sum() for which in (~positive & ~rose, positive, ~positive & rose)]
