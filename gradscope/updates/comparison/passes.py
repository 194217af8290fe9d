"""The passes through the network that a comparison asks for: summed gradients by prompt, then changes along them.

Of each row of weights one backward pass, prompt by prompt, gives ‖u_p‖², ⟨u_p, u_p of plain⟩ and U; then one pass in
forward mode along U gives ⟨g_t, U⟩ of every token, and with the weights every inner product with U. Under AdamW
another one goes along U ⊘ (√v̂ + ε). Rows are taken as many at a time as memory holds: one row needs three vectors as
long as the parameters (its sum, its prompt's and the plain one's), and autograd's gradient of a prompt. A row that is a
combination of plain and another one (Lopti's second step is plain less its first) takes no pass: all is linear in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from gradscope.gradients import (
    Derivative,
    PromptGradients,
    Resources,
    Sketcher,
    SumsPlan,
    fixed_cotangents,
    own_rows,
    predict_changes,
    vector_bytes,
)
from gradscope.policy import PART, AdamWState, Policy, square_norm
from gradscope.rollouts import TokenBatch
from gradscope.updates.comparison.noise import Products

SKETCH = 1 << 12, 1 << 16
"""Numbers of the sketches whose inner products tell how far prompts' gradients spread, least and most."""
SKETCHED_AT_ONCE = 1 << 10
"""Times the sketch's length that a vector may have before the sketch is longer."""
SEED = 2112
TRIED = 512
"""Tokens from which a combination of rows is guessed, before it is tried on all."""
CANCELLED = 1e-2
"""Share of the squares that a combination's parts add up to, below which its own rounding would be too large."""


@dataclass(frozen=True)
class Passes:
    """What the passes found, in float64; the first row of weights is plain."""

    products: Products
    changes: Float[np.ndarray, "R K"]
    """⟨g_t, U⟩ of each kept token of the batch, whose sign is that of its first-order movement under SGD."""
    adamw_changes: Float[np.ndarray, "R K"] | None
    """The same along U ⊘ (√v̂ + ε); None without an optimizer state."""
    plan: SumsPlan
    """How the summed gradients were made."""
    method: Derivative
    """How the changes were taken."""
    at_once: int
    """Rows of weights that were taken at a time."""
    seconds: dict[str, float]
    """Time of the backward passes and of the derivatives along the sums."""


def pass_through(
    policy: Policy,
    batch: TokenBatch,
    weights: Float[Tensor, "R K"],
    *,
    metric: AdamWState | None = None,
    resources: Resources,
) -> Passes:
    """U = Σ_t w_t·g_t / K for each row of weights of the K kept tokens, by prompt, and every token's change along it.

    The prompts are those of the batch with kept tokens, in the order of their numbers. resources: settled.
    """
    keep = batch.response_mask
    cotangents = torch.zeros(len(weights), *keep.shape, dtype=weights.dtype)
    cotangents[:, keep] = weights / batch.num_tokens
    # What has no weight has no gradient, and nobody asks which way it goes.
    asked = keep & ((cotangents != 0).any(0) | (batch.advantages != 0))
    rows = asked.any(1).nonzero()[:, 0]
    trained, cotangents = batch.select(rows), cotangents[:, rows]
    prompts = batch.group_ids[keep.any(1)].unique()
    return _Work(policy, trained, cotangents, prompts, metric, resources).run(batch, rows)


class _Work:
    def __init__(
        self,
        policy: Policy,
        batch: TokenBatch,
        cotangents: Float[Tensor, "R b S"],
        prompts: Int[Tensor, " n"],
        metric: AdamWState | None,
        resources: Resources,
    ) -> None:
        self.policy, self.batch, self.cotangents, self.metric = policy, batch, cotangents, metric
        self.memory, self.processes = resources.vectors, resources.processes
        self.passes = {"micro_batch_size": resources.micro_batch, "progress": resources.progress}
        self.numbers = torch.searchsorted(prompts, batch.group_ids)
        """Of each response's prompt among all."""
        self.mine: list[int] = []
        size, n = len(cotangents), len(prompts)
        self.own, self.own_plain, self.kernel = np.zeros((size, n)), np.zeros((size, n)), np.zeros((size, n, n))
        self.scale: Tensor | None = None
        self.crossed: dict[int, Float[np.ndarray, "n n"]] = {}
        """⟨u_p of plain, u_q⟩, of the sketches."""
        self.seconds = {"backward": 0.0, "forward mode": 0.0}

    def run(self, batch: TokenBatch, rows: Int[Tensor, " b"]) -> Passes:
        combined = find_combinations(self.cotangents[:, self.batch.response_mask].numpy())
        found = torch.zeros(1 + (self.metric is not None), *self.cotangents.shape, dtype=torch.float64)
        plan, method = self._pass([row for row in range(len(self.cotangents)) if row not in combined], found)
        if cancelled := [row for row, parts in combined.items() if not self._combine(row, *parts, found)]:
            plan, method = self._pass(cancelled, found)
        kept = torch.zeros(*found.shape[:2], *batch.input_ids.shape, dtype=torch.float64)
        kept[:, :, rows] = found
        kept = kept[:, :, batch.response_mask].numpy()
        adamw = kept[1] if self.metric is not None else None
        return Passes(self._products(found[0]), kept[0], adamw, plan, method, self._at_once(), self.seconds)

    def _pass(self, rows: Sequence[int], found: Float[Tensor, "m R b S"]) -> tuple[SumsPlan, Derivative]:
        """Sums and changes of these rows, the changes into `found`."""
        at_once = self._at_once()
        for start in range(0, len(rows), at_once):
            chosen = rows[start : start + at_once]
            begun = perf_counter()
            totals, plan = self._sums(chosen)
            self.seconds["backward"] += perf_counter() - begun
            begun = perf_counter()
            for number, directions in enumerate(self._directions(totals)):
                found[number, chosen], method = self._changes(directions)
            self.seconds["forward mode"] += perf_counter() - begun
            del totals
        return plan, method

    def _combine(self, row: int, plain: float, factor: float, other: int, found: Float[Tensor, "m R b S"]) -> bool:
        """All of a row that is plain·(the first) + factor·(other); False, and nothing, where the two cancel."""
        squares = plain**2 * self.own[0], factor**2 * self.own[other]
        own = squares[0] + squares[1] + 2 * plain * factor * self.own_plain[other]
        if own.sum() < CANCELLED * np.sum(squares):
            return False
        self.own[row], self.own_plain[row] = own, plain * self.own[0] + factor * self.own_plain[other]
        crossed = plain * factor * self.crossed[other]
        self.kernel[row] = plain**2 * self.kernel[0] + factor**2 * self.kernel[other] + crossed + crossed.T
        found[:, row] = plain * found[:, 0] + factor * found[:, other]
        return True

    def _at_once(self) -> int:
        """Rows of which a sum and a prompt's vector fit, beside the plain one's, autograd's and the metric."""
        vectors = self.memory // vector_bytes(self.policy.model) - 2 - (self.metric is not None)
        return int(min(len(self.cotangents), max(1, vectors // 2)))

    def _sums(self, chosen: Sequence[int]) -> tuple[Float[Tensor, "k P"], SumsPlan]:
        """U of these rows; their prompts' products are noted on the way."""
        rows = [*chosen] if 0 in chosen else [*chosen, 0]
        held = {"rows": len(rows), "held": len(chosen), "memory": self.memory, "processes": self.processes}
        cotangents = fixed_cotangents(self.cotangents[rows])
        source = PromptGradients(self.policy, self.batch, cotangents, metric=False, **held, **self.passes)
        numbers = [int(self.numbers[own[0]]) for own in own_rows(self.batch)]
        totals, into = source.new_totals(len(chosen)), [*range(len(chosen)), None][: len(rows)]
        n = self.own.shape[1]
        width = source.plan.sketch_size or _sketch_width(totals.shape[1])
        sketches = torch.zeros(len(rows), n, width, dtype=torch.float64)
        own, own_plain = (np.zeros((len(chosen), n)) for _ in range(2))
        sketcher = Sketcher(width, seed=SEED)
        for number, (_, vectors) in enumerate(source.parts(totals=totals, into=into)):
            for prompt, found in vectors:
                place, plain = numbers[prompt], found[rows.index(0)]
                for row, vector in enumerate(found):
                    if row < len(chosen):
                        own[row, place] += square_norm(vector)
                        own_plain[row, place] += _inner(vector, plain)
                    if source.plan.sketch_size is None:
                        sketcher.add(vector.cpu(), number, sketches[row, place])
                    else:
                        sketches[row, place] = vector.cpu()
        for values in (own, own_plain):
            self.processes.sum(torch.from_numpy(values))
        self.processes.sum(sketches)
        self.own[chosen], self.own_plain[chosen] = own, own_plain
        self.kernel[chosen] = (sketches @ sketches.transpose(1, 2))[: len(chosen)].numpy()
        self.crossed |= {row: (sketches[rows.index(0)] @ sketches[k].T).numpy() for k, row in enumerate(chosen)}
        self.mine = source.prompts
        return totals, source.plan

    def _directions(self, totals: Float[Tensor, "k P"]) -> Iterator[Float[Tensor, "k P"]]:
        """U of each row, then in its place U ⊘ (√v̂ + ε) where there is a metric."""
        yield totals
        if self.metric is not None:
            if self.scale is None:  # plain is the first row
                self.scale = self.metric.scale(self.policy.model, totals[0])
            for row in totals:
                row.mul_(self.scale.to(row))
            yield totals

    def _changes(self, directions: Float[Tensor, "k P"]) -> tuple[Float[Tensor, "k b S"], Derivative]:
        """Of every kept token along each direction; each process takes the prompts that it has."""
        prompts = own_rows(self.batch)
        changes = torch.zeros(len(directions), *self.batch.input_ids.shape, dtype=torch.float64)
        method = "forward mode"
        if self.mine:
            mine = torch.cat([prompts[number] for number in self.mine]).sort().values
            found, method = predict_changes(self.policy.model, self.batch.select(mine), directions, **self.passes)
            changes[:, mine] = found.double()
        self.processes.sum(changes)
        return changes, method

    def _products(self, changes: Float[Tensor, "R b S"]) -> Products:
        cotangents = self.cotangents.double()

        def by_prompt(values: Float[Tensor, "R b S"]) -> Float[np.ndarray, "R n"]:
            out = torch.zeros(len(values), self.own.shape[1], dtype=torch.float64)
            return out.index_add_(1, self.numbers, values.sum(2)).numpy()

        return Products(
            self.own,
            by_prompt(cotangents * changes),
            self.kernel,
            self.own_plain,
            by_prompt(cotangents * changes[:1]),
            by_prompt(cotangents[:1] * changes),
        )


def find_combinations(weights: Float[np.ndarray, "R K"]) -> dict[int, tuple[float, float, int]]:
    """Row → (a, c, b), where it is a·(the first row) + c·(row b) to rounding, and b itself is none of these.

    >>> find_combinations(np.array([[1.0, 1.0, 2.0], [1.0, 0.0, 0.0], [0.0, 1.0, 2.0]]))
    {2: (1.0, -1.0, 1)}
    """
    some = np.unique(np.linspace(0, weights.shape[1] - 1, TRIED).astype(int))
    found: dict[int, tuple[float, float, int]] = {}
    for row, own in enumerate(weights):
        for other in (o for o in range(1, row) if o not in found):
            pair = weights[[0, other]]
            factors = np.linalg.lstsq(pair[:, some].T, own[some], rcond=None)[0]
            if own.any() and np.abs(factors @ pair - own).max() <= 1e-12 * np.abs(factors[:, None] * pair).max():
                found[row] = (*np.round(factors, 12).tolist(), other)
                break
    return found


def _inner(a: Float[Tensor, " p"], b: Float[Tensor, " p"]) -> float:
    """⟨a, b⟩ in float64, of which only a part is there at a time."""
    pairs = zip(a.split(PART), b.split(PART), strict=True)
    return sum((one.double() @ other.double()).item() for one, other in pairs)


def _sketch_width(length: int) -> int:
    """Numbers of a sketch of vectors of this length."""
    width = SKETCH[0]
    while width < SKETCH[1] and length > SKETCHED_AT_ONCE * width:
        width *= 2
    return width
