"""Collect each token's numbers from a trainer's own forward and backward passes, by probability interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from gradscope.integrations.trl.batch import number_prompts
from gradscope.integrations.trl.watch import SeenBatch
from gradscope.intervals import assign_intervals

Number = int | float
Column = Float[np.ndarray, " n"]
MEANS = {"clipped_share": "clipped", "masked_share": "masked", "mismatch": "mismatch", "entropy": "entropy"}
"""Metric → the column of `TokenColumns` that it averages over an interval's tokens."""

BINS = np.linspace(0, 1, 21)
"""Histogram edges for π_old."""


@dataclass(frozen=True)
class TokenColumns:
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
    """Compute metrics from `TokenColumns.sums`, added over processes; NaN for 0/0."""
    tokens, amounts, *rest = sums
    with np.errstate(invalid="ignore", divide="ignore"):
        found = {"token_share": tokens / tokens.sum(), "logit_grad_share": amounts / amounts.sum()}
        found |= {name: rest[2 * k] / rest[2 * k + 1] for k, name in enumerate(MEANS)}
    return {f"{kind}/{a}": float(v) for kind, values in found.items() for a, v in zip(names, values, strict=True)}


def collect_columns(parts: Sequence[SeenBatch], clipped: Sequence[Tensor | None]) -> TokenColumns:
    """Collect the kept tokens of a step's micro-batches, once their slopes are known.

    clipped: whether the loss clips a token's ratio; [B, C] or [B, 1] of each; None: no clip, or an unknown one.
    """
    columns = [_columns(part, cut) for part, cut in zip(parts, clipped, strict=True)]
    places = [part.kept.nonzero().cpu().numpy() for part in parts]
    joined = np.concatenate(columns, axis=1)
    logprob, old, entropy, log_sum_squares, slope, clipped, masked, mismatch = joined
    number = np.repeat(np.arange(len(parts)), [len(each) for each in places])
    row, place = np.concatenate(places).T
    amount = np.abs(slope) * logit_grad_norms(logprob, log_sum_squares)
    first = np.cumsum([0, *(len(part.logprob) for part in parts)])
    prompt = number_prompts([part.inputs for part in parts]).numpy()[first[number] + row]
    return TokenColumns(logprob, old, entropy, amount, clipped, masked, mismatch, number, row, place, prompt)


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


def _columns(part: SeenBatch, clipped: Tensor | None) -> Float[np.ndarray, "8 n"]:
    """Return the columns of a micro-batch's kept tokens, moved to the CPU in one transfer."""
    sampler, factors = part.inputs.get("sampling_per_token_logps"), [*part.kept_by_masks]
    mismatch = None if sampler is None else (part.old - sampler).abs()
    if "importance_sampling_ratio" in part.inputs:
        factors.append(part.inputs["importance_sampling_ratio"])
    lost = [(factor == 0).expand_as(part.logprob) for factor in factors]
    masked = torch.stack(lost).any(0) if lost else None
    known = (part.logprob, part.old, part.entropy, part.log_sum_squares, part.slope, clipped, masked, mismatch)
    return torch.stack([_spread(c, part.logprob) for c in known])[:, part.kept].cpu().double().numpy()


def _spread(values: Any, like: Float[Tensor, "B C"]) -> Float[Tensor, "B C"]:
    """Broadcast a column, or NaN for an unknown one (None), to float32 [B, C]."""
    if values is None:
        return torch.full_like(like, float("nan"), dtype=torch.float32)
    return values.float().expand_as(like)
