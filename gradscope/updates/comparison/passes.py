"""Compute a comparison's products with J: summed gradients by prompt, then every token's change along them.

For each row of weights, one backward pass gives ‖u_p‖², ⟨u_p, u_p of plain⟩ and U (`TokenJacobian.gram`). Forward mode
along U then gives ⟨g_t, U⟩ of every token and thus, with the weights, every inner product with U. Under AdamW a second
derivative is taken along U ⊘ (√v̂ + ε). Memory limits the rows per pass: each needs two parameter-sized vectors (its sum
and one prompt's), in addition to plain's and autograd's. A row that is a combination of plain and another (Lopti's
second step is plain minus its first) needs no pass, since everything is linear in the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from time import monotonic

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from gradscope.gradients import Derivative, SumsPlan, TokenJacobian, Vectors, latest_end
from gradscope.policy import AdamWState
from gradscope.updates.comparison.noise import Products

CANCELLED = 1e-2
"""A combination whose square is below this fraction of its parts' squares is too inexact, and takes a pass."""


@dataclass(frozen=True)
class Passes:
    """Results of the passes, in float64; the first row of weights is plain."""

    products: Products
    changes: Float[np.ndarray, "R K"]
    """⟨g_t, U⟩ of each kept token; its sign is that of the token's first-order movement under SGD."""
    adamw_changes: Float[np.ndarray, "R K"] | None
    """The same along U ⊘ (√v̂ + ε); None without an optimizer state."""
    plan: SumsPlan
    """How the summed gradients were computed."""
    method: Derivative
    """How the changes were computed."""
    at_once: int
    """Number of rows per pass."""
    entropy_slopes: Float[np.ndarray, " K"] | None = None
    """`updates.entropy_slopes` of plain's step; None if not asked for, or for lack of time."""
    missing: tuple[int, ...] = ()
    """Rows skipped because of the deadline; their numbers are zeros."""

    def select(self, rows: Sequence[int]) -> Passes:
        """Select these rows, given in ascending order and including row 0."""
        rows = [*rows]
        products = Products(*(values[rows] for values in self.products))
        adamw = None if self.adamw_changes is None else self.adamw_changes[rows]
        return replace(self, products=products, changes=self.changes[rows], adamw_changes=adamw, missing=())


SlopesOf = Callable[[Float[Tensor, " P"]], Float[np.ndarray, " K"]]
"""Computes the entropy's slopes by token from a loss's gradient."""


def pass_through(
    J: TokenJacobian,
    weights: Float[Tensor, "R K"],
    *,
    metric: AdamWState | None = None,
    slopes_of: SlopesOf | None = None,
) -> Passes:
    """Compute U = Σ_t w_t·g_t / K by prompt, for each row of weights over the K kept tokens, and each token's change.

    Prompts are those of the batch with kept tokens, in the order of their numbers. If J's resources have a deadline,
    rows are processed until about then, but always the first and one more. slopes_of: called on plain's gradient.
    """
    # A response without weights has no gradient, and its tokens' directions are not counted.
    asked = (weights != 0).any(0) | (J.kept(J.batch.advantages) != 0)
    row = J.batch.response_mask.nonzero()[:, 0]
    rows = row[asked].unique() if asked.any() else row.unique()
    inside = torch.isin(row, rows)
    work = _Work(J.select(rows), weights[:, inside] / J.num_tokens, J.prompts, metric, slopes_of)
    work.run()
    changes = torch.zeros(len(work.changes), *weights.shape, dtype=torch.float64)
    changes[:, :, inside] = work.changes
    plain, *adamw = changes.numpy()
    missing = tuple(row for row in range(len(weights)) if row not in work.done)
    how = work.plan, work.derivative, work.at_once, work.slopes
    return Passes(work.products(), plain, adamw[0] if adamw else None, *how, missing)


class _Work:
    """The passes over one Jacobian's tokens, `at_once` rows at a time, and what has come of them so far."""

    def __init__(
        self,
        J: TokenJacobian,
        weights: Float[Tensor, "R k"],
        prompts: Int[Tensor, " n"],
        metric: AdamWState | None,
        slopes_of: SlopesOf | None,
    ) -> None:
        self.J, self.weights, self.metric, self.prompts = J.until(None), weights, metric, prompts
        self.begun, self.deadline, self.longest = monotonic(), J.resources.deadline, 0.0
        self.done: set[int] = set()
        self.slopes_of = slopes_of
        self.slopes: Float[np.ndarray, " K"] | None = None
        size, n = len(weights), len(prompts)
        self.own, self.own_plain, self.kernel = np.zeros((size, n)), np.zeros((size, n)), np.zeros((size, n, n))
        self.crossed = np.zeros((size, n, n))
        """⟨u_p of plain, u_q⟩, from the sketches."""
        self.changes = torch.zeros(1 + (metric is not None), *weights.shape, dtype=torch.float64)
        self.scale: Tensor | None = None
        self.at_once = J.rows_at_once(size, metric=metric is not None)  # in addition to plain
        self.way = J.plan_gram(min(size, self.at_once + 1), pairs="within").way

    def run(self) -> None:
        """Compute all rows' sums and the changes along them, up to those that would end too late."""
        combined = find_combinations(self.weights.numpy())
        self._take([row for row in range(len(self.weights)) if row not in combined])
        known = {row: parts for row, parts in combined.items() if parts[2] in self.done}
        self._take([row for row, parts in known.items() if not self._combine(row, *parts)])
        if self.slopes is None and self.slopes_of is not None and not self._is_late(monotonic()):
            self.slopes = self.slopes_of(self._sum([0])[0].rows[0])  # under a deadline, weightings come first

    def _take(self, rows: Sequence[int]) -> None:
        for start in range(0, len(rows), self.at_once):
            started = monotonic()
            if len(self.done) > 1 and self._is_late(started):
                break
            chosen = rows[start : start + self.at_once]
            totals, self.plan = self._sum(chosen)
            if 0 in chosen and self.slopes_of is not None and self.deadline is None:
                self.slopes = self.slopes_of(totals.rows[0])
            for number, directions in enumerate(self._directions(totals)):
                changes = self.J.jvp(directions)
                self.changes[number, chosen] = changes.logprob.double()
            self.derivative = changes.how
            self.done |= {*chosen}
            self.longest = max(self.longest, monotonic() - started)

    def _combine(self, row: int, plain: float, factor: float, other: int) -> bool:
        """Fill a row as plain·(first row) + factor·(other row); return False if they nearly cancel."""
        squares = plain**2 * self.own[0], factor**2 * self.own[other]
        own = squares[0] + squares[1] + 2 * plain * factor * self.own_plain[other]
        if own.sum() < CANCELLED * np.sum(squares):
            return False
        self.own[row], self.own_plain[row] = own, plain * self.own[0] + factor * self.own_plain[other]
        crossed = plain * factor * self.crossed[other]
        self.kernel[row] = plain**2 * self.kernel[0] + factor**2 * self.kernel[other] + crossed + crossed.T
        self.changes[:, row] = plain * self.changes[:, 0] + factor * self.changes[:, other]
        self.done.add(row)
        return True

    def products(self) -> Products:
        weights, changes = self.weights.double(), self.changes[0]
        response = self.J.batch.response_mask.nonzero()[:, 0]
        number = torch.searchsorted(self.prompts, self.J.batch.group_ids)[response]

        def by_prompt(values: Float[Tensor, "R k"]) -> Float[np.ndarray, "R n"]:
            sums = torch.zeros(len(values), len(self.prompts), dtype=torch.float64)
            return sums.index_add_(1, number, values).numpy()

        along, to_plain, from_plain = weights * changes, weights * changes[:1], weights[:1] * changes
        return Products(
            self.own, by_prompt(along), self.kernel, self.own_plain, by_prompt(to_plain), by_prompt(from_plain)
        )

    def _is_late(self, now: float) -> bool:
        """Return whether a pass as long as the longest would end far beyond the deadline or run mostly after it."""
        if self.deadline is None:
            return False
        far, end = now + self.longest / 2 > self.deadline, now + self.longest
        late = far or end > latest_end(self.begun, self.deadline)
        return self.J.resources.processes.gather([late])[0]

    def _sum(self, chosen: Sequence[int]) -> tuple[Vectors, SumsPlan]:
        """Return U of these rows; store their prompts' products."""
        rows = [*chosen] if 0 in chosen else [*chosen, 0]
        count, plain = len(chosen), rows.index(0)
        found = self.J.gram(self.weights[rows], pairs="within", sketch=True, totals=True, way=self.way)
        place = np.searchsorted(self.prompts.numpy(), found.groups)
        self.own[np.ix_(chosen, place)] = np.einsum("prr->rp", found.products)[:count]
        self.own_plain[np.ix_(chosen, place)] = found.products[:, :count, plain].T
        sketches = found.sketches.cpu().double().transpose(0, 1)
        self.kernel[np.ix_(chosen, place, place)] = (sketches @ sketches.transpose(1, 2))[:count].numpy()
        self.crossed[np.ix_(chosen, place, place)] = (sketches[plain] @ sketches.transpose(1, 2))[:count].numpy()
        return found.totals[:count], found.plan

    def _directions(self, totals: Vectors) -> Iterator[Vectors]:
        """Yield U of each row and then, with a metric, U ⊘ (√v̂ + ε), computed in place."""
        yield totals
        if self.metric is not None:
            if self.scale is None:  # plain is the first row
                self.scale = self.metric.scale(self.J.model, totals.rows[0])
            for row in totals.rows:
                row.mul_(self.scale.to(row))
            yield totals


def find_combinations(weights: Float[np.ndarray, "R K"]) -> dict[int, tuple[float, float, int]]:
    """Map each row equal to a·(first row) + c·(row b), up to rounding, to (a, c, b); row b is not itself in the map.

    >>> find_combinations(np.array([[1.0, 1.0, 2.0], [1.0, 0.0, 0.0], [0.0, 1.0, 2.0]]))
    {2: (1.0, -1.0, 1)}
    """
    found: dict[int, tuple[float, float, int]] = {}
    for row, own in enumerate(weights):
        for other in (o for o in range(1, row) if o not in found):
            pair = weights[[0, other]]
            factors = np.linalg.lstsq(pair.T, own, rcond=None)[0]
            if own.any() and np.abs(factors @ pair - own).max() <= 1e-12 * np.abs(factors[:, None] * pair).max():
                found[row] = (*np.round(factors, 12).tolist(), other)
                break
    return found
