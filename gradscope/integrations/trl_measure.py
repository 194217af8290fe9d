"""The gradient of one optimizer step, interval by interval, with the denominators of a trainer's own loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, pairwise

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from gradscope.gradients import gram, measuring, weighted_gradients
from gradscope.objective import LossSettings, TokenStatistics, batch_statistics, batch_weights, own_where_unknown
from gradscope.policy import flat_slices, float_parameters
from gradscope.rollouts import TokenBatch
from gradscope.updates import batch_direction_shares, old_intervals

Number = int | float


@dataclass
class StepMeasurement:
    """One optimizer step: the numbers of before it and, after `finish`, of what it did."""

    batch: TokenBatch
    """With old_logprobs everywhere."""
    before: TokenStatistics
    edges: Sequence[Number]
    numbers: dict[str, float] = field(default_factory=dict)

    def finish(self, model: nn.Module, *, micro_batch_size: int) -> None:
        """Add the right-direction shares of the step that the model has taken since."""
        after = score(model, self.batch, micro_batch_size)
        for row in batch_direction_shares(self.before, after, self.batch, edges=self.edges).itertuples():
            self.numbers[f"right_direction_{row.sign}/{name_bins(self.edges)[row.interval]}"] = float(row.share)


def measure_step(
    model: nn.Module,
    batch: TokenBatch,
    settings: LossSettings,
    denominators: Float[Tensor, " B"],
    *,
    edges: Sequence[Number],
    cosines: bool,
    micro_batch_size: int,
) -> StepMeasurement:
    """Norms, shares and cosines of the intervals' parts of the gradient −Σ_i 1/D_i Σ_t w_t · ∇ log π_t (Eq. 2).

    denominators: D_i of each response. The gradient is over the parameters that require one. Names of the numbers are
    those of `GradScopeCallback`. The model measures in eval mode; flags, modes and `.grad` stay as they were.
    """
    before = score(model, batch, micro_batch_size)
    batch = replace(batch, old_logprobs=own_where_unknown(batch.old_logprobs, before.logprob))
    weights = batch_weights(before.logprob, batch, settings, num_tokens=batch.num_tokens).total
    intervals = old_intervals(batch, edges)
    masks = torch.stack([intervals == a for a in range(len(edges) - 1)])
    trained = _trained_columns(model)
    sums = weighted_gradients(model, batch, -weights / denominators[:, None] * masks, micro_batch_size=micro_batch_size)
    products = gram(sums if trained is None else sums[:, trained]).numpy()
    names = name_bins(edges)
    numbers = {f"token_share/{a}": int(mask.sum()) / batch.num_tokens for a, mask in zip(names, masks, strict=True)}
    geometry = _geometry(products, masks.flatten(1).any(1).numpy(), names, cosines=cosines)
    return StepMeasurement(batch, before, edges, numbers | geometry)


def name_bins(edges: Sequence[Number]) -> list[str]:
    """Probability bins by their edges in percent, as names of scalars.

    >>> name_bins((0, 0.25, 1))
    ['p0-25', 'p25-100']
    """
    return [f"p{100 * low:g}-{100 * high:g}" for low, high in pairwise(edges)]


def score(model: nn.Module, batch: TokenBatch, micro_batch_size: int) -> TokenStatistics:
    """The statistics of the batch's tokens under the model as it is, in eval mode and the precision of its weights."""
    device = next(model.parameters()).device
    with measuring(model):
        return batch_statistics(model, batch, micro_batch_size=micro_batch_size, device=device)


def _trained_columns(model: nn.Module) -> Tensor | None:
    """Where the trained parameters lie in a vector that is flat over all of them; None: everywhere."""
    slices = flat_slices(model)
    flags = [(slices[name], p.requires_grad) for name, p in float_parameters(model)]
    if all(flag for _, flag in flags):
        return None
    columns = [torch.arange(part.start, part.stop) for part, flag in flags if flag]
    return torch.cat(columns).to(next(model.parameters()).device)


def _geometry(products: np.ndarray, filled: np.ndarray, bins: Sequence[str], *, cosines: bool) -> dict[str, float]:
    """Norms, shares and cosines from the intervals' inner products; NaN for an interval without tokens, and for 0/0."""
    add_all = np.vstack([np.eye(len(products)), np.ones(len(products))])
    gram = add_all @ products @ add_all.T
    norms = np.sqrt(np.diag(gram).clip(min=0))
    with np.errstate(invalid="ignore", divide="ignore"):
        between, shares = gram / np.outer(norms, norms), gram[:, -1] / gram[-1, -1]
    empty = ~np.append(filled, True)
    norms[empty] = shares[empty] = np.nan
    between[empty] = between[:, empty] = np.nan
    names = [*bins, "all"]
    numbers = {f"grad_norm/{name}": norm for name, norm in zip(names, norms, strict=True)}
    numbers |= {f"grad_share/{name}": share for name, share in zip(names[:-1], shares, strict=False)}
    for a, b in combinations(range(len(names)), 2) if cosines else ():
        numbers[f"grad_cosine/{names[a]}/{names[b]}"] = between[a, b]
    return {name: float(number) for name, number in numbers.items()}
