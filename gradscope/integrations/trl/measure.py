"""Measure the gradient of one optimizer step by interval, given the slopes of the trainer's own loss."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, pairwise

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from gradscope.gradients import Resources, TokenJacobian, Vectors, inner_products
from gradscope.objective import TokenStatistics, fill_unknown
from gradscope.policy import float_parameters, group_names
from gradscope.rollouts import TokenBatch
from gradscope.updates import SIGNS, batch_direction_shares, old_intervals

Number = int | float


@dataclass
class StepMeasurement:
    """Measurement of one optimizer step: its gradient and, after `finish`, its effect."""

    batch: TokenBatch
    """This process's responses, with old_logprobs everywhere."""
    jacobian: TokenJacobian | None
    """None if no token is kept."""
    before: TokenStatistics | None
    """Of the tokens before the step; None if there are none."""
    edges: Sequence[Number]
    products: Float[np.ndarray, "intervals intervals"]
    """⟨G_a, G_b⟩."""
    num_tokens: int
    """Over all processes."""
    sizes: Float[np.ndarray, "2 intervals"]
    """`rounding_sizes` summed over each interval's tokens."""
    device: torch.device
    """Device of the weights."""
    numbers: dict[str, float] = field(default_factory=dict)

    def norm_of(self, intervals: Sequence[bool]) -> float:
        """Return ‖Σ G_a‖ over some of the intervals."""
        chosen = np.asarray(intervals, dtype=float)
        return math.sqrt(max(chosen @ self.products @ chosen, 0.0))

    def rounding_of(self, intervals: Sequence[bool]) -> float:
        """Return the approximate relative float32 rounding error of a trainer's ‖Σ G_a‖ over some of the intervals."""
        return relative_rounding(*(self.sizes @ np.asarray(intervals, dtype=float)))

    def finish(self) -> None:
        """Add the right-direction shares, once the model has taken the step."""
        names = [f"right_direction_{sign}/{name}" for name in name_intervals(self.edges) for sign in SIGNS]
        counts = torch.zeros(2, len(names), dtype=torch.float64)  # moved the right way, and moved at all
        if self.jacobian is not None:
            after = self.jacobian.moved().statistics
            shares = batch_direction_shares(self.before, after, self.batch, edges=self.edges)
            for row in shares.itertuples():
                place = names.index(f"right_direction_{row.sign}/{name_intervals(self.edges)[row.interval]}")
                moved = row.num_tokens - row.tied
                counts[:, place] = torch.tensor([moved * row.share if moved else 0.0, moved])
        right, moved = add_over_processes(counts, self.device).tolist()
        self.numbers |= {n: r / m if m else float("nan") for n, r, m in zip(names, right, moved, strict=True)}


def measure_step(
    model: nn.Module,
    batch: TokenBatch,
    slopes: Float[Tensor, "B S"],
    *,
    edges: Sequence[Number],
    cosines: bool,
    resources: Resources,
) -> StepMeasurement | None:
    """Measure the gradient Σ_t slope_t · ∇ log π_t: norms, shares and cosines of its intervals' parts, and norms by
    module group.

    slopes: ∂loss/∂ log π; those of dropped tokens are ignored. The gradient is over the measured parameters, and the
    mean over processes, which must all call this, each with its own responses. Returns None if no process keeps a
    token. Numbers are named as in `GradScopeCallback`. The model runs in eval mode; flags, modes and `.grad` are
    restored.
    """
    device = next(model.parameters()).device
    J = TokenJacobian(model, batch, resources) if batch.num_tokens else None
    counts = torch.zeros(len(edges) - 1, dtype=torch.float64)
    sizes, before = torch.zeros(2, len(counts), dtype=torch.float64), None
    if J is not None:
        before = J.statistics
        batch = replace(batch, old_logprobs=fill_unknown(batch.old_logprobs, before.logprob))
        masks = interval_masks(batch, before, edges)
        counts = masks.flatten(1).sum(1).double()
    counts = add_over_processes(counts, device).numpy()
    if not counts.sum():
        return None
    if J is None:
        sums = Vectors.zeros(model, len(counts)).rows
    else:
        cotangents = torch.where(masks, slopes, 0.0)
        sizes = rounding_sizes(cotangents, masks, batch.num_tokens, before).sum((2, 3))
        sums = J.vjp(J.kept(cotangents)).rows
    sums = add_over_processes(sums, device)
    products = inner_products(sums).numpy() / count_processes() ** 2
    sizes = add_over_processes(sizes, device).numpy()
    names = name_intervals(edges)
    numbers = {f"token_share/{a}": float(count / counts.sum()) for a, count in zip(names, counts, strict=True)}
    numbers |= _geometry(products, counts > 0, names, cosines=cosines) | _module_norms(model, sums)
    return StepMeasurement(batch, J, before, edges, products, int(counts.sum()), sizes, device, numbers)


def interval_masks(batch: TokenBatch, before: TokenStatistics, edges: Sequence[Number]) -> Bool[Tensor, "R B S"]:
    """Return the kept tokens of each interval of π_old, which is that of `before` where unknown."""
    batch = replace(batch, old_logprobs=fill_unknown(batch.old_logprobs, before.logprob))
    intervals = old_intervals(batch, edges)
    return torch.stack([intervals == a for a in range(len(edges) - 1)])


def rounding_sizes(
    cotangents: Float[Tensor, "intervals B S"],
    masks: Bool[Tensor, "intervals B S"],
    num_tokens: int,
    before: TokenStatistics,
) -> Float[Tensor, "2 intervals B S"]:
    """Return |slope| · (1 − π) of each token, the scale of its gradient, and max(|slope|, 1/N).

    A float32 trainer may err by 2⁻²⁴ of the second, since it computes 1 − π from π, and slopes near 0 from ratios near
    1, which it divides by about N, the process's tokens.
    """
    amounts, ones = cotangents.abs().double(), masks / num_tokens
    return torch.stack([amounts * before.log_one_minus_prob.exp(), torch.maximum(amounts, ones)])


def relative_rounding(left: float, whole: float) -> float:
    """Return the approximate relative float32 rounding error of a trainer's gradient, from sums of `rounding_sizes`."""
    return 2**-24 * whole / left if left else math.inf


def count_processes() -> int:
    """Return the number of processes that train together, each on its own responses."""
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def add_over_processes(numbers: Tensor, device: torch.device) -> Tensor:
    """Return the sum of all processes' tensors, on the device of `numbers`; device: that of the weights."""
    if count_processes() == 1:
        return numbers
    moved = numbers.to(device)
    torch.distributed.all_reduce(moved)
    return moved.to(numbers.device)


def agree(count: int, device: torch.device) -> int:
    """Return the main process's number in all processes."""
    main = count_processes() == 1 or torch.distributed.get_rank() == 0
    return int(add_over_processes(torch.tensor(count if main else 0), device))


def name_intervals(edges: Sequence[Number]) -> list[str]:
    """Name probability intervals by their edges in percent, for use in metric names.

    >>> name_intervals((0, 0.25, 1))
    ['p0-25', 'p25-100']
    """
    return [f"p{100 * low:g}-{100 * high:g}" for low, high in pairwise(edges)]


def _module_norms(model: nn.Module, sums: Float[Tensor, "intervals P"]) -> dict[str, float]:
    """Return ‖G‖ over each module group, from the sums over processes."""
    groups, squares, start = group_names(model), defaultdict(float), 0
    for name, parameter in float_parameters(model):
        part = sums[:, start : (start := start + parameter.numel())].sum(0).double()
        squares[groups[name].replace(", ", "").replace(" ", "_")] += float(part @ part)
    return {f"module_norm/{group}": math.sqrt(square) / count_processes() for group, square in squares.items()}


def _geometry(products: np.ndarray, filled: np.ndarray, intervals: Sequence[str], *, cosines: bool) -> dict[str, float]:
    """Return norms, shares and cosines from the intervals' inner products; NaN for empty intervals and 0/0."""
    add_all = np.vstack([np.eye(len(products)), np.ones(len(products))])
    gram = add_all @ products @ add_all.T
    norms = np.sqrt(np.diag(gram).clip(min=0))
    with np.errstate(invalid="ignore", divide="ignore"):
        between, shares = gram / np.outer(norms, norms), gram[:, -1] / gram[-1, -1]
    empty = ~np.append(filled, True)
    norms[empty] = shares[empty] = np.nan
    between[empty] = between[:, empty] = np.nan
    names = [*intervals, "all"]
    numbers = {f"grad_norm/{name}": norm for name, norm in zip(names, norms, strict=True)}
    numbers |= {f"grad_share/{name}": share for name, share in zip(names[:-1], shares, strict=False)}
    for a, b in combinations(range(len(names)), 2) if cosines else ():
        numbers[f"grad_cosine/{names[a]}/{names[b]}"] = between[a, b]
    return {name: float(number) for name, number in numbers.items()}
