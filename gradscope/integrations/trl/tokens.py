"""Collect each token's numbers from a trainer's own forward and backward passes, by probability interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gradscope.integrations.trl.batch import Inputs
from gradscope.intervals import assign_intervals

Number = int | float
Column = Float[np.ndarray, " n"]
MEANS = {"clipped_share": "clipped", "masked_share": "masked", "mismatch": "mismatch", "entropy": "entropy"}
"""Metric → the column of `StepTokens` that it averages over an interval's tokens."""


BINS = np.linspace(0, 1, 21)
"""Histogram edges for π_old."""


@dataclass
class SeenBatch:
    """Tensors that a trainer computed for one micro-batch's loss, [B, C] over completions, on its device."""

    inputs: Inputs
    logprob: Tensor
    entropy: Tensor | None
    log_sum_squares: Tensor
    """log Σ_j π_j²."""
    clipped: Tensor | None = None
    """Whether the loss clips the token's ratio; [B, C] or [B, 1]; None: no clip, or an unknown one."""
    kept_by_masks: list[Tensor] = field(default_factory=list)
    """Masks that multiply the loss, apart from the completion's; [B, C] or [B, 1]."""
    slope: Tensor | None = None
    """∂loss/∂ log π from the backward pass; None: not yet known."""

    @property
    def kept(self) -> Bool[Tensor, "B C"]:
        mask = self.inputs["completion_mask"]
        return (mask * self.inputs["tool_mask"] if "tool_mask" in self.inputs else mask).bool()

    @property
    def old(self) -> Tensor:
        """log π_old, or log π if the trainer keeps no log π_old per token."""
        return self.inputs.get("old_per_token_logps", self.logprob)

    def masked(self) -> Tensor | None:
        """Return which tokens a mask or a sampler correction of 0 removes; None if the loss has neither."""
        factors = [*self.kept_by_masks]
        if "importance_sampling_ratio" in self.inputs:
            factors.append(self.inputs["importance_sampling_ratio"])
        lost = [factor == 0 for factor in factors]
        return torch.stack([each.expand_as(self.logprob) for each in lost]).any(0) if lost else None


@dataclass(frozen=True)
class StepTokens:
    """Kept tokens of one process's part of a step, [n] in float64; NaN: unknown."""

    logprob: Column
    old: Column
    """log π_old."""
    entropy: Column
    amount: Column
    """|∂loss/∂ log π|·‖e − π‖: norm of the token's gradient at its own logits, up to 1/T."""
    clipped: Column
    masked: Column
    mismatch: Column
    """|log π_old − log π_sampler|."""
    part: Int[np.ndarray, " n"]
    """Micro-batch, row and position of the token."""
    row: Int[np.ndarray, " n"]
    place: Int[np.ndarray, " n"]
    prompt: Int[np.ndarray, " n"]
    """Index of its prompt in this part of the step."""

    @property
    def probs(self) -> Column:
        """π_old."""
        return np.exp(self.old).clip(0, 1)

    def sums(self, edges: Sequence[Number]) -> Float[np.ndarray, "K intervals"]:
        """Sum by interval of π_old: tokens, amounts, then for each metric of MEANS its values and their number."""
        intervals = assign_intervals(self.probs, edges)

        def by_interval(values: Column) -> np.ndarray:
            return np.bincount(intervals, values, minlength=len(edges) - 1)

        rows = [by_interval(np.ones(len(intervals))), by_interval(self.amount)]
        for column in MEANS.values():
            values = getattr(self, column)
            known = ~np.isnan(values)
            rows += [by_interval(np.where(known, values, 0.0)), by_interval(known.astype(np.float64))]
        return np.stack(rows)

    def histograms(self) -> Float[np.ndarray, "2 bins"]:
        """Sum tokens and amounts by BINS."""
        return np.stack([np.histogram(self.probs, BINS, weights=w)[0] for w in (np.ones_like(self.old), self.amount)])

    def by_prompt(self, edges: Sequence[Number]) -> Float[np.ndarray, "2 prompts intervals"]:
        """Sum tokens and amounts by prompt and interval."""
        size = len(edges) - 1
        cells = self.prompt * size + assign_intervals(self.probs, edges)
        count = (int(self.prompt.max(initial=-1)) + 1) * size
        sums = [np.bincount(cells, w, minlength=count) for w in (np.ones_like(self.old), self.amount)]
        return np.stack(sums).reshape(2, -1, size)


def numbers_of(sums: Float[np.ndarray, "K intervals"], names: Sequence[str]) -> dict[str, float]:
    """Compute metrics from `StepTokens.sums`, added over processes; NaN for 0/0."""
    tokens, amounts, *rest = sums
    with np.errstate(invalid="ignore", divide="ignore"):
        found = {"token_share": tokens / tokens.sum(), "logit_grad_share": amounts / amounts.sum()}
        found |= {name: rest[2 * k] / rest[2 * k + 1] for k, name in enumerate(MEANS)}
    return {f"{kind}/{a}": float(v) for kind, values in found.items() for a, v in zip(names, values, strict=True)}


def step_tokens(parts: Sequence[SeenBatch]) -> StepTokens:
    """Collect the kept tokens of a step's micro-batches, once their slopes are known."""
    columns = [_columns(part) for part in parts]
    places = [part.kept.nonzero().cpu().numpy() for part in parts]
    joined = np.concatenate(columns, axis=1)
    logprob, old, entropy, log_sum_squares, slope, clipped, masked, mismatch = joined
    number = np.repeat(np.arange(len(parts)), [len(each) for each in places])
    row, place = np.concatenate(places).T
    amount = np.abs(slope) * logit_grad_norms(logprob, log_sum_squares)
    prompt = np.concatenate(_number_prompts(parts))[np.cumsum([0, *(len(p.logprob) for p in parts)])[number] + row]
    return StepTokens(logprob, old, entropy, amount, clipped, masked, mismatch, number, row, place, prompt)


def logit_grad_norms(logprob: Column, log_sum_squares: Column) -> Column:
    """Return ‖e − π‖ = √(1 − 2π + Σπ²) from a trainer's float32 log π and log Σπ².

    Near π = 1 the terms cancel, so the result is clipped to its bounds 1 − π and √2·(1 − π) (Prop. 4.2 of
    arXiv:2505.12929).

    >>> logit_grad_norms(np.log([0.5]), np.log([0.375])).round(6).tolist()  # for ½, ¼, ¼: √(½² + ¼² + ¼²)
    [0.612372]
    """
    rest = np.maximum(-np.expm1(logprob), 0.0)
    squares = 1 - 2 * np.exp(logprob) + np.exp(log_sum_squares)
    return np.sqrt(np.maximum(squares, 0.0)).clip(rest, np.sqrt(2) * rest)


def _columns(part: SeenBatch) -> Float[np.ndarray, "8 n"]:
    """Return the columns of a micro-batch's kept tokens, moved to the CPU in one transfer."""
    sampler = part.inputs.get("sampling_per_token_logps")
    mismatch = None if sampler is None else (part.old - sampler).abs()
    known = (part.logprob, part.old, part.entropy, part.log_sum_squares, part.slope)
    columns = torch.stack([_spread(c, part.logprob) for c in (*known, part.clipped, part.masked(), mismatch)])
    return columns[:, part.kept].cpu().double().numpy()


def _number_prompts(parts: Sequence[SeenBatch]) -> list[Int[np.ndarray, " B"]]:
    """Number equal prompts alike across micro-batches, from 0."""
    numbers: dict[tuple[int, ...], int] = {}
    found = []
    for part in parts:
        ids, real = part.inputs["prompt_ids"].cpu().numpy(), part.inputs["prompt_mask"].cpu().numpy() > 0
        rows = (tuple(row[seen].tolist()) for row, seen in zip(ids, real, strict=True))
        found.append(np.array([numbers.setdefault(row, len(numbers)) for row in rows]))
    return found


def _spread(values: Any, like: Float[Tensor, "B C"]) -> Float[Tensor, "B C"]:
    """Broadcast a column, or NaN for an unknown one (None), to float32 [B, C]."""
    if values is None:
        return torch.full_like(like, float("nan"), dtype=torch.float32)
    return values.float().expand_as(like)
