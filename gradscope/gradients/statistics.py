"""Statistics of every response token that need no backward pass: its probability, weight, ‖e − π‖ and interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import inf
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from gradscope.errors import InputError
from gradscope.gradients.columns import describe_tokens, refuse_infinite_weights, weigh_tokens
from gradscope.gradients.logged_logprobs import OTHERS, SAMPLERS, refuse_foreign_logprobs
from gradscope.intervals import assign_intervals
from gradscope.objective import LossSettings, TokenStatistics
from gradscope.rollouts import TokenBatch
from gradscope.runs import ALONE, Processes, Progress, track

if TYPE_CHECKING:
    from gradscope.gradients.engine.meter import TokenGradientMeter


@dataclass(frozen=True)
class BatchStatistics:
    """Statistics of every response token before any is measured, in table order, on the CPU."""

    columns: dict[str, Tensor]
    """The columns of `describe_tokens`, and `logit_grad_norm`."""
    intervals: Int[np.ndarray, " n"]
    """Interval of π of each token."""
    prefixes: Int[np.ndarray, " n"]
    """Number of tokens before each token."""
    bounds: Int[np.ndarray, " b"]
    """Where each response's tokens begin, followed by the total number of tokens."""

    def span(self, row: int) -> slice:
        """Return the slice of one response's tokens."""
        return slice(*self.bounds[row : row + 2])

    def of(self, row: int) -> dict[str, Tensor]:
        """Return the columns of one response's tokens."""
        return {name: values[self.span(row)] for name, values in self.columns.items()}

    @property
    def responses(self) -> Int[np.ndarray, " n"]:
        """Row of each token's response [n]."""
        return np.repeat(np.arange(len(self.bounds) - 1), np.diff(self.bounds))


def find_statistics(
    meter: TokenGradientMeter,
    batch: TokenBatch,
    loss: LossSettings | None,
    *,
    edges: Sequence[float],
    processes: Processes = ALONE,
    progress: bool | Progress = False,
    names: Sequence[int] | None = None,
) -> BatchStatistics:
    """Compute the statistics of a batch, with one forward pass per response that keeps a token, shared by processes.

    loss: None: no weights. names: of the responses, in errors; None: their rows.

    Raises InputError if the policy gives a token probability 0, a weight is infinite, or logged log-probabilities
    cannot belong to these tokens.
    """
    sizes = batch.response_mask.sum(1)
    bounds = np.cumsum([0, *sizes.tolist()])
    with processes.together():
        kept = sizes.nonzero()[:, 0]
        mine = kept[processes.rank :: processes.count]
        found, start = {}, 0
        for row in track(mine.tolist(), "scoring", progress, unit="responses"):
            named = row if names is None else names[row]
            for name, values in _response_columns(meter, batch, row, named).items():
                # One preallocated tensor per column: thousands of small ones took three times the memory.
                whole = found.setdefault(name, values.new_empty(int(sizes[mine].sum())))
                whole[start : start + len(values)] = values
            start += int(sizes[row])
    columns, shares = found, processes.gather([found])
    if len(shares) > 1:
        process = torch.arange(len(kept)).repeat_interleave(sizes[kept]) % len(shares)
        columns = {name: values.new_empty(len(process)) for name, values in shares[0].items()}
        for rank, share in enumerate(shares):  # empty where there are fewer responses than processes
            own = process == rank
            for name, values in share.items():
                columns[name][own] = values
    rows = torch.arange(len(sizes)) if names is None else torch.tensor(names)
    response, positions = rows.repeat_interleave(sizes), batch.positions()[batch.response_mask]
    if loss is not None:
        columns |= weigh_tokens(batch, columns, loss)
        refuse_infinite_weights(columns | {"response": response, "position": positions})
    for name in (*SAMPLERS, *OTHERS):
        if name in columns:
            own, logged = (columns[which].split(sizes.tolist()) for which in ("logprob", name))
            refuse_foreign_logprobs(own, logged, name)
    return BatchStatistics(
        columns,
        assign_intervals(columns["prob"].numpy(), edges).astype(np.int16),
        np.concatenate([batch.sequence(row)[1].numpy() for row in range(len(batch))]),
        bounds,
    )


def _response_columns(meter: TokenGradientMeter, batch: TokenBatch, row: int, named: int) -> dict[str, Tensor]:
    """Compute one response's columns, in its own pass, so that the digits of π do not depend on other responses."""
    ids, targets = batch.sequence(row)
    one = batch.select([row])
    candidates = tuple(values[row][batch.response_mask[row]] for values in batch.candidates)
    given = {"temperature": float(batch.temperature[row]), "candidates": candidates}
    statistics, norms = meter.measure_cheaply(ids, targets, **given)
    *known, norms = torch.stack([*(getattr(statistics, f.name) for f in fields(statistics)), norms]).cpu()
    statistics = TokenStatistics(*known)
    _check_probabilities(statistics, one, named)
    return describe_tokens(one, statistics) | {"logit_grad_norm": norms}


def _check_probabilities(statistics: TokenStatistics, one: TokenBatch, row: int) -> None:
    if not statistics.entropy.isfinite().all():
        raise InputError(f"the policy's logits are NaN on response {row}; load a sound checkpoint, or another --dtype")
    if impossible := (statistics.logprob == -inf).nonzero().flatten().tolist():
        position = int(one.positions()[0][one.response_mask[0]][impossible[0]])
        raise InputError(
            f"response {row} has a token at position {position} that the policy cannot produce (π is exactly 0); "
            "was it sampled by another policy? Drop the token by response_mask, or the response"
        )
