"""From a batch to optimizer steps: which tokens each step trains, its gradient piece by piece, clipping, the update.

The trainer and whoever asks what one update does share this file, so that the measured step is the trained step.
Equations and Alg. 1 are those of arXiv:2505.12929.
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
from gradscope.objective.logprobs import TokenStatistics
from gradscope.objective.loss import (
    LossSettings,
    batch_loss,
    batch_weights,
    check_advantages,
    fill_unknown,
    weigh_step,
)
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
    """all, low, high, random-low (as many as low, drawn at random), random-high."""
    batch: TokenBatch
    """A mini-batch, with advantages and π_old; its response_mask keeps only the tokens of this step."""
    num_tokens: int
    """The loss's denominator: all response tokens of the mini-batch, whichever step they are in."""


class StepTotals(NamedTuple):
    """Sums over a step's micro-batches."""

    loss: float
    clipped_low: float
    clipped_high: float
    clipped_dual: float
    statistics: TokenStatistics | None = None
    """Statistics of the tokens before the step, where it was asked to score them."""


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did."""

    name: str
    """The step's name."""
    outcome: Literal["taken", "empty", "nonfinite"]
    """empty: no token, no step (AdamW would decay and coast); nonfinite: a NaN or infinite gradient, no step."""
    loss: float
    """Loss of the step, by its denominator."""
    grad_norm: float
    """Before clipping, rescaled already where a `match` was asked for; NaN for an empty step."""
    grad_norm_clipped: float
    """After clipping: what the optimizer saw; NaN where no step was taken."""
    num_tokens: int
    """Tokens in the step."""
    clipped_low: int
    """Tokens with Â < 0 and π_θ/π_old < 1 − ε_low: they have no policy gradient."""
    clipped_high: int
    """Tokens with Â > 0 and π_θ/π_old > 1 + ε_high."""
    clipped_dual: int
    """Tokens with Â < 0 and π_θ/π_old > c."""
    statistics: TokenStatistics | None = None
    """Statistics of the tokens before the step, where it was asked to score them."""

    @classmethod
    def empty(cls, part: StepTokens) -> StepResult:
        """Return the result of a step without tokens."""
        return cls(part.name, "empty", 0.0, math.nan, math.nan, 0, 0, 0, 0)


def whole_steps(batch: TokenBatch, mini_batch_size: int) -> list[StepTokens]:
    """Make one step of each mini-batch of consecutive responses."""
    return [StepTokens("all", part, part.num_tokens) for part in batch.micro_batches(mini_batch_size)]


def split_steps(
    batch: TokenBatch,
    mini_batch_size: int,
    groups: Sequence[tuple[str, Mask]],
    *,
    schedule: Literal["sweep", "interleaved"] = "sweep",
) -> list[StepTokens]:
    """Make a step of each group of tokens in each mini-batch (Alg. 1, Lopti), groups in the order given.

    sweep: all mini-batches for the first group, then for the next (L1 L2 H1 H2, the authors' code); interleaved: all
    groups of a mini-batch, then the next one (L1 H1 L2 H2, the other reading of the text).
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
    """Return what clipping multiplies a gradient of this norm by; None: 1.

    Raises InputError for a norm that is not finite, with which no step is taken.
    """
    if not math.isfinite(norm):
        raise InputError(f"the gradient's norm is {norm}, so no step is taken; look for the response that makes it so")
    return max_grad_norm / (norm + 1e-6) if max_grad_norm is not None and norm > max_grad_norm else 1.0


@dataclass(frozen=True)
class Updater:
    """A model and the optimizer that trains it: accumulates a step's gradient, clips it, and steps."""

    model: nn.Module
    """As it is called: wrapped by accelerate where several processes share it."""
    optimizer: Any
    """An optimizer of torch, or one wrapped by accelerate."""
    device: torch.device
    micro_batch_size: int
    """Most responses in one forward pass; changes nothing but rounding."""
    max_grad_norm: Number | None = 1.0
    """None: not clipped."""
    processes: Processes = ALONE
    no_sync: Callable[[nn.Module], AbstractContextManager] = lambda model: nullcontext()
    """Several processes: backward passes in it do not exchange gradients yet."""

    def step(
        self,
        part: StepTokens,
        settings: LossSettings,
        *,
        match: LossSettings | None = None,
        weighting: Weighting | None = None,
        score: bool = False,
    ) -> StepResult:
        """Take one optimizer step on the gradient of its tokens' loss under `settings`.

        match: rescale that gradient, before clipping, to the norm that it has under these other settings.
        weighting: its w_t, of the policy before the step, in the place of Eq. 2's policy part; the KL part stays.
        score: the result has the statistics of its tokens before it, from its own forward pass.
        With a gradient that is not finite, and without tokens, no step is taken.
        """
        if part.batch.num_tokens == 0:
            self.optimizer.zero_grad()
            return StepResult.empty(part)
        wanted = None
        if match is not None:
            self.accumulate(part, match)
            wanted = self.grad_norm()
            self.optimizer.zero_grad()
        if weighting is not None:
            weights = self._weigh(part, settings, weighting)
            part = replace(part, batch=replace(part.batch, advantages=weights))
        totals = self.accumulate(part, settings, weighted=weighting is not None, score=score)
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
            # Autocast keeps copies of the weights in low precision: those from before the step must go.
            torch.clear_autocast_cache()
        self.optimizer.zero_grad()
        result = (loss, norm, clipped if finite else float("nan"), part.batch.num_tokens, *map(int, counts))
        return StepResult(part.name, "taken" if finite else "nonfinite", *result, totals.statistics)

    def accumulate(
        self, part: StepTokens, settings: LossSettings, *, weighted: bool = False, score: bool = False
    ) -> StepTotals:
        """Add the gradient of the step's loss to `.grad`; weighted: its advantages are the tokens' weights themselves.

        score: the statistics of its tokens, too.
        Each micro-batch's loss has the whole mini-batch's denominator, so that they add up to the step's own.
        """
        if not weighted:
            check_advantages(part.batch)  # once, where it lies: no loss on the device looks for it
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

    def _weigh(self, part: StepTokens, settings: LossSettings, weighting: Weighting) -> Float[Tensor, "B S"]:
        """Find w_t of the step's tokens under the policy as it is, by one more forward pass."""
        found = batch_statistics(
            self.model, part.batch, micro_batch_size=self.micro_batch_size, device=self.device, processes=self.processes
        )
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

        Where a log π is not finite, so are loss and gradient, by which the step is skipped: no device is waited for.
        """
        loss = make_loss(logprobs, piece, settings, num_tokens=num_tokens, refuse_nan=False)
        broken = (~logprobs.isfinite()).any()
        loss = loss + logprobs.sum() * loss.new_zeros(()).masked_fill(broken, math.nan)
        # Processes share a step's responses and accelerate averages their gradients: the sum is count times that.
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
    """Return −Σ w_t·log π_t / N plus the loss's KL part; the weights are in the place of the advantages."""
    plain = replace(piece, advantages=torch.zeros_like(logprobs))
    kl = batch_loss(logprobs, plain, settings, num_tokens=num_tokens, refuse_nan=refuse_nan)
    products = torch.where(piece.response_mask, piece.advantages.to(logprobs) * logprobs, 0.0)
    if piece.loss_scales is not None:
        products = products * piece.loss_scales[:, None]
    return kl - products.sum() / num_tokens


def _count_clipped(logprobs: Float[Tensor, "b n"], piece: TokenBatch, settings: LossSettings) -> list[Int[Tensor, ""]]:
    """Count the tokens whose policy gradient clipping removed: low, high, dual."""
    clipped = batch_weights(logprobs, piece, settings, num_tokens=1, refuse_nan=False).clipped
    rose = logprobs > fill_unknown(piece.old_logprobs, logprobs)
    positive = piece.advantages > 0
    return [(clipped & which).sum() for which in (~positive & ~rose, positive, ~positive & rose)]
