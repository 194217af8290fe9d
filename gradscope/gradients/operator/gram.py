"""Inner products of sums of token gradients, computed within a memory budget.

- **whole**: vectors as long as the parameters, by one forward pass and a backward pass per vector.
- **sketches**: random projections of the gradients (`sketches`), accumulated during the backward pass, block by block
  where possible. Inner products are unbiased, with a known error, for any number of groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, inf
from time import monotonic
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from gradscope.errors import InputError
from gradscope.gradients.operator.forward_mode import BACKWARD
from gradscope.gradients.operator.reverse_mode import add_gradients, differentiable, stream_gradients
from gradscope.gradients.operator.sketches import BLOCKS, Sketcher
from gradscope.gradients.operator.sweep import Sweep
from gradscope.gradients.operator.vectors import Vectors, inner_products, vector_bytes, zero_vectors
from gradscope.gradients.resources import Resources, latest_end
from gradscope.objective import kept_logprobs
from gradscope.policy import AdamWState, flat_slices, float_parameters, free_memory
from gradscope.resampling import FEWEST, jackknife_error
from gradscope.rollouts import TokenBatch
from gradscope.runs import deal_by_cost, digits, track

Way = Literal["whole", "sketches"]
Pairs = Literal["all", "within"]
Statistic = Callable[[Float[np.ndarray, "n ..."], Float[np.ndarray, "R R"]], np.ndarray]
"""A statistic of the products by group and of the products of the totals."""
Piece = tuple[Int[Tensor, " _"], TokenBatch]
"""A micro-batch, with the indices of its tokens among all kept ones."""

SEED, BETWEEN = 5929, 2112
"""Seeds of the random projections: of gradients as they arrive, and of whole vectors. Fixed, so that runs agree."""

SKETCH = 1 << 16
"""Length of a sketch: the error of an inner product is 1/256 of the product of the norms."""
LEAST_SKETCH = 1 << 10
BETWEEN_WIDTH = 1 << 12, 1 << 16
"""Shortest and longest sketch kept in addition to whole vectors."""
SKETCHED_AT_ONCE = 1 << 10
"""A sketch is doubled while the vector is more than this many times as long."""
SLICE = 1 << 21
"""Entries converted to float64 at a time."""


@dataclass(frozen=True)
class SumsPlan:
    """How the vectors behind a Gram are computed."""

    way: Way
    rows: int
    """Rows of weights."""
    groups: int
    """Groups that fit the budget: all, or fewer if the inner products of all pairs do not fit."""
    memory: int
    """Budget, bytes."""
    sketch_size: int | None
    """Length of a sketch; None for whole vectors."""
    blocks: int
    """Blocks of a sketch's coordinates whose inner products are kept separately; 1 for whole vectors."""
    forward_passes: float
    """Cost of computing the vectors once, in forward passes over the batch (a backward pass counts as two)."""

    def __str__(self) -> str:
        cost = f"about {self.forward_passes:.0f} forward passes over the batch"
        if self.sketch_size is None:
            return f"summed gradients: exact, all parameters at once, {cost}"
        return (
            f"summed gradients: sketches of {self.sketch_size:,} numbers, {cost}; inner products err by "
            f"{digits(100 * self.sketch_size**-0.5)} % of the norms' product (one standard deviation)"
        )


@dataclass(frozen=True)
class Sizes:
    """The sizes that determine the memory of a Gram."""

    parameters: int
    """Number of measured parameters."""
    largest: int
    """Entries of the largest parameter, or of the largest block."""
    states: int
    """Entries of a piece's hidden states; one copy is kept per block and one per row of weights."""
    blocks: int
    groups: int
    width: int = 4
    """Bytes per entry: 4, or 8 in float64."""


def plan_gram(
    sizes: Sizes, *, rows: int, pairs: Pairs, memory: int, metric: bool = False, way: Way | None = None
) -> SumsPlan:
    """Choose how to keep R vectors per group: whole if they fit into `memory` bytes, else as sketches.

    If the inner products of all pairs of groups do not fit either, the plan is for as many groups as do, but at least
    FEWEST.

    Args:
        metric: whether the sum of all vectors is needed too.
        way: force this way.

    Raises:
        InputError: they do not fit into memory.
    """
    found = _fit(sizes, rows, pairs, memory, metric, way)
    if isinstance(found, int) and pairs == "all":  # their products grow with the square of the groups
        low, high = 0, sizes.groups
        while high - low > 1:
            middle = (low + high) // 2
            fewer = _fit(replace(sizes, groups=middle), rows, pairs, memory, metric, way)
            low, high = (low, middle) if isinstance(fewer, int) else (middle, high)
        if low >= min(FEWEST, sizes.groups):
            found = _fit(replace(sizes, groups=low), rows, pairs, memory, metric, way)
    if isinstance(found, int):
        raise InputError(
            f"summed gradients need {_in_words(found)} at least and the budget is {_in_words(memory)}; give "
            f"--gradient-memory {found} or more, or fewer responses"
        )
    return found


def _fit(sizes: Sizes, rows: int, pairs: Pairs, memory: int, metric: bool, way: Way | None) -> SumsPlan | int:
    """Return the plan for all groups, or the bytes that it would need if `memory` is less."""
    width, held = sizes.width, rows * (sizes.groups if pairs == "all" else 1)
    products = 8 * (held**2 if pairs == "all" else sizes.groups * rows**2)
    whole = (held + rows + 1 + metric) * sizes.parameters * width  # and the gradient as autograd returns it
    blocks = BLOCKS if 4 * (BLOCKS + 1) * products <= memory else BLOCKS // 4
    transient = (sizes.largest + (sizes.blocks + 1 + rows) * sizes.states) * width + (blocks + 1) * products
    kept, size = (rows * sizes.groups + rows) * width, SKETCH
    while size > LEAST_SKETCH and kept * size > memory - transient:
        size //= 2
    least = {"whole": whole, "sketches": transient + kept * size}
    fits = [name for name in ([way] if way else least) if least[name] <= memory]
    if not fits:
        return min(least.values()) if way is None else least[way]
    cost = 1 + BACKWARD * rows
    if fits[0] == "whole":
        return SumsPlan("whole", rows, sizes.groups, memory, None, 1, cost)
    return SumsPlan("sketches", rows, sizes.groups, memory, size, blocks, cost + 1)  # each block is run once more


@dataclass(frozen=True, eq=False)
class Gram:
    """Inner products over all measured parameters of u_{p,r} = Σ_t weights[r, t]·g_t over the tokens of group p."""

    parts: Float[np.ndarray, "M n R n R"] | Float[np.ndarray, "M n R R"]
    """⟨u_{p,r}, u_{q,s}⟩ in float64, for all pairs of groups or within each, split by the M blocks of a sketch's
    coordinates; M is 1 for whole vectors."""
    total_parts: Float[np.ndarray, "M R R"]
    """The same for the sums over groups, U_r = Σ_p u_{p,r}."""
    plan: SumsPlan
    groups: tuple[int, ...]
    """Ids of the n groups, ascending."""
    totals: Vectors | None = None
    """U_r, if requested or available anyway."""
    sketches: Float[Tensor, "n R k"] | None = None
    """A sketch of each u_{p,r}, if requested or available anyway."""
    scaled: Gram | None = None
    """The Gram of D ⊙ u_{p,r}, in AdamW's metric; None if not requested, or not ready by the deadline."""

    @classmethod
    def exact(cls, products: Float[np.ndarray, "n R n R"]) -> Gram:
        """Make a Gram from known inner products of all pairs."""
        plan = SumsPlan("whole", products.shape[1], len(products), products.nbytes, None, 1, 0.0)
        return cls(products[None], products.sum((0, 2))[None], plan, tuple(range(len(products))))

    @property
    def products(self) -> Float[np.ndarray, "n ..."]:
        return self.parts.sum(0)

    @property
    def total(self) -> Float[np.ndarray, "R R"]:
        return self.total_parts.sum(0)

    def error(self, statistic: Statistic) -> np.ndarray:
        """Return the standard error of a statistic of (products, total) due to sketching; 0 for whole vectors."""
        if len(self.parts) == 1:
            return np.zeros_like(statistic(self.products, self.total))
        shapes = self.parts.shape[1:], self.total_parts.shape[1:]
        flat = np.hstack([self.parts.reshape(len(self.parts), -1), self.total_parts.reshape(len(self.parts), -1)])
        cut = int(np.prod(shapes[0]))
        return jackknife_error(lambda f: statistic(f[:cut].reshape(shapes[0]), f[cut:].reshape(shapes[1])), list(flat))


class _Late(Exception):
    """Raised when the current group would end too long after the deadline."""


class GroupSums:
    """The vectors u_{p,r} = Σ_t weights[r, t]·∇ log π_t of each group's tokens, computed group by group."""

    def __init__(
        self,
        model: nn.Module,
        blocks: nn.ModuleList,
        weights: Float[Tensor, "R K"],
        pieces: dict[int, list[Piece]],
        resources: Resources,
    ) -> None:
        self.model, self.blocks, self.weights, self.resources = model, blocks, weights, resources
        self.groups, self._pieces = tuple(pieces), list(pieces.values())
        costs = [float(sum(piece.input_ids.numel() for _, piece in own)) for own in self._pieces]
        processes = resources.processes
        self.mine = deal_by_cost(range(len(costs)), costs, processes.count)[processes.rank]
        """Indices of the groups that this process computes."""
        if resources.deadline is not None:
            self.mine = np.random.default_rng(SEED).permutation(self.mine).tolist()
        self._latest = inf
        """Time at which the current group is abandoned."""

    def plan(self, pairs: Pairs, *, metric: bool = False, way: Way | None = None) -> SumsPlan:
        """Choose the way by its memory. Raises InputError if none fits."""
        named, within = float_parameters(self.model), [{id(p) for p in b.parameters()} for b in self.blocks]
        blocks = [sum(p.numel() for _, p in named if id(p) in own) for own in within]
        # For a tied embedding, both gradients and their sum exist at the same time.
        largest = max(3 * max(p.numel() for _, p in named), *blocks)
        positions = max(piece.input_ids.numel() for own in self._pieces for _, piece in own)
        one = zero_vectors(self.model, 0)
        states = positions * self.model.config.get_text_config().hidden_size
        sizes = Sizes(one.shape[1], largest, states, len(blocks), len(self.groups), one.element_size())
        rows, memory = len(self.weights), self.resources.vectors
        return plan_gram(sizes, rows=rows, pairs=pairs, memory=memory, metric=metric, way=way)

    def multiply(
        self,
        plan: SumsPlan,
        pairs: Pairs,
        *,
        metric: AdamWState | None = None,
        sketch: bool = False,
        totals: bool = False,
    ) -> Gram:
        """Multiply the vectors; see `TokenJacobian.gram`."""
        if plan.groups < len(self.groups):
            self._narrow(sorted(np.random.default_rng(SEED).permutation(len(self.groups))[: plan.groups].tolist()))
        keeps_whole = plan.way == "whole"
        wanted = pairs == "within" if keeps_whole else totals
        sums = self._zeros(plan, len(self.weights)) if wanted else None
        total = self._zeros(plan, 1) if metric is not None else None
        begun, deadline = monotonic(), self.resources.deadline
        if deadline is not None and metric is not None and not (keeps_whole and pairs == "all"):
            # A second pass, equally long, follows.
            self.resources = replace(self.resources, deadline=(begun + deadline) / 2)
        found, vectors = self._pass(plan, pairs, totals=sums, total=total, sketch=sketch)
        # A second pass covers the same groups, all or none.
        self.resources = replace(self.resources, deadline=None)
        self._latest = inf if deadline is None else latest_end(begun, deadline)
        if metric is None:
            return found
        scale = metric.turn_into_scale(self.model, total.rows[0])
        if vectors is not None and keeps_whole:  # no second pass needed
            scaled = self._all(plan, vectors.mul_(scale.to(vectors)))
        elif not self.resources.processes.gather([2 * monotonic() - begun <= self._latest])[0]:
            scaled = None  # a second pass would take too long
        else:
            del vectors
            again = self._zeros(plan, len(self.weights)) if keeps_whole else None
            scaled, _ = self._pass(plan, pairs, totals=again, scale=scale)
        return replace(found, scaled=scaled)

    def _zeros(self, plan: SumsPlan, count: int) -> Vectors:
        """Allocate sums; in a scratch file if vectors are sketched, unless the GPU has room."""
        device = next(self.model.parameters()).device
        roomy = device.type == "cuda" and (count + 3) * vector_bytes(self.model) <= free_memory(device)
        return Vectors.zeros(self.model, count, None if roomy or plan.way == "whole" else 0)

    def _pass(
        self,
        plan: SumsPlan,
        pairs: Pairs,
        *,
        totals: Vectors | None = None,
        total: Vectors | None = None,
        scale: Float[Tensor, " P"] | None = None,
        sketch: bool = False,
    ) -> tuple[Gram | None, Float[Tensor, "n R size"] | None]:
        """Compute all vectors once. Adds their sums by row to `totals` and, before scaling, the sum of all to `total`.

        Returns no Gram if scaled vectors were not all ready in time.
        """
        n, rows, together = len(self.groups), len(self.weights), self.resources.processes
        size = plan.sketch_size or zero_vectors(self.model, 0).shape[1]
        keeps = pairs == "all" or plan.sketch_size is not None
        kept = zero_vectors(self.model, 0).new_zeros(n, rows, size) if keeps else None
        sketcher = Sketcher(sketch_width(size), seed=BETWEEN)
        sketches = torch.zeros(n, rows, sketcher.size, dtype=torch.float64) if sketch and not plan.sketch_size else None
        within = np.zeros((plan.blocks, n, rows, rows))
        for group, vectors in self._vectors(plan, scale, total, totals):
            if kept is not None:
                kept[group] = vectors
            if pairs == "within":
                within[:, group] += [inner_products(block).numpy() for block in vectors.chunk(plan.blocks, dim=1)]
            if totals is not None and plan.way == "whole":
                totals.rows.add_(vectors.to(totals.rows))
            for row, vector in enumerate(vectors) if sketches is not None else ():
                sketcher.add(vector.cpu(), 0, sketches[group, row])
        for shared in (kept, sketches, torch.from_numpy(within), *(v.rows for v in (totals, total) if v is not None)):
            if shared is not None:
                together.sum(shared)
        if (made := sorted(together.gather(self._made))) != [*range(n)]:  # the deadline came first
            if scale is not None:
                return None, None
            factor = self._narrow(made)
            kept, sketches = (None if vectors is None else vectors[made] * factor for vectors in (kept, sketches))
            within = within[:, made] * factor**2
            for vectors in (totals, total):
                if vectors is not None:
                    vectors.rows.mul_(factor)
        if pairs == "all":
            return self._all(plan, kept, totals), kept
        if kept is None:
            whole = totals.products().numpy()[None]
        else:
            whole = np.stack([inner_products(block).numpy() for block in kept.sum(0).chunk(plan.blocks, dim=1)])
        return Gram(within, whole, plan, self.groups, totals, sketches if kept is None else kept), kept

    def _all(self, plan: SumsPlan, kept: Float[Tensor, "n R size"], totals: Vectors | None = None) -> Gram:
        parts = np.stack([block_products(block) for block in kept.chunk(plan.blocks, dim=2)])
        whole = plan.sketch_size is None
        totals = Vectors(kept.sum(0), flat_slices(self.model)) if whole else totals
        return Gram(parts, parts.sum((1, 3)), plan, self.groups, totals, None if whole else kept)

    def _vectors(
        self, plan: SumsPlan, scale: Float[Tensor, " P"] | None, total: Vectors | None, totals: Vectors | None
    ) -> Iterator[tuple[int, Float[Tensor, "R size"]]]:
        """Yield (index, vectors) of this process's groups; the next group overwrites the vectors."""
        longest = max(piece.width for own in self._pieces for _, piece in own)
        with differentiable(self.model, longest):
            make = self._whole() if plan.way == "whole" else self._sketched(plan, scale, total, totals)
            for group, vectors in make:
                if plan.way == "whole" and total is not None:
                    for vector in vectors:
                        total.rows[0] += vector.to(total.rows)
                if plan.way == "whole" and scale is not None:
                    vectors.mul_(scale.to(vectors))
                yield group, vectors

    def _counted(self) -> Iterator[tuple[int, list[Piece]]]:
        """Yield the groups to compute; under a deadline in random order, until the next one would end too late.

        A group starts if half of it fits, judged by those before, and may overrun by at most a quarter of the time.
        """
        self._made: list[int] = []
        deadline, begun, progress = self.resources.deadline, monotonic(), self.resources.progress
        if deadline is None:
            for group in track(self.mine, "gradients", progress, unit="prompts"):
                yield group, self._pieces[group]
                self._made.append(group)
            return
        latest, longest, left = latest_end(begun, deadline), 0.0, max(0.0, deadline - begun)
        with progress.stage("gradients of as many prompts as fit", left or None, "seconds") as advance:
            for group in self.mine:
                started = monotonic()
                half = (started - begun) / (2 * max(1, len(self._made)))
                if self._made and (started + half > deadline or started + longest > latest):
                    return
                self._latest = latest if self._made else inf
                yield group, self._pieces[group]
                self._made.append(group)
                longest = max(longest, monotonic() - started)
                advance(monotonic() - started)

    def _check_clock(self) -> None:
        """Abandon the current group if the machine has become so slow that it would end too late.

        The group then counts as not drawn, like those after it. This favours short groups: in the worst case, where the
        length always decides about the last group, the mean length of n groups is too small by about its squared
        coefficient of variation over n, which is below its sampling error.
        """
        if monotonic() > self._latest:
            raise _Late

    def _narrow(self, made: list[int]) -> float:
        """Keep only these groups, and return the factor on their weights that makes a mean over their tokens alone."""
        count = sum(len(places) for group in made for places, _ in self._pieces[group])
        factor = self.weights.shape[1] / count
        self.weights = self.weights * factor
        places = {group: place for place, group in enumerate(made)}
        self.mine = [places[group] for group in self.mine if group in places]
        self._pieces = [self._pieces[group] for group in made]
        self.groups = tuple(self.groups[group] for group in made)
        return factor

    def _whole(self) -> Iterator[tuple[int, Float[Tensor, "R P"]]]:
        found, slices = zero_vectors(self.model, len(self.weights)), flat_slices(self.model)
        sweep = Sweep(self.model, self.blocks)

        def take(row: int, name: str, gradient: Float[Tensor, " p"]) -> None:
            self._check_clock()
            found[row, slices[name]] += gradient.to(found)

        for group, pieces in self._counted():
            found.zero_()
            try:
                for places, piece in pieces:
                    if sweep.is_needed(piece):
                        sweep.pass_back(piece, self.weights[:, places], take)
                    else:
                        logprobs = kept_logprobs(self.model, piece)
                        self._check_clock()
                        add_gradients(self.model, logprobs, self.weights[:, places].to(logprobs), found)
            except _Late:
                return
            yield group, found

    def _sketched(
        self, plan: SumsPlan, scale: Float[Tensor, " P"] | None, total: Vectors | None, totals: Vectors | None
    ) -> Iterator[tuple[int, Float[Tensor, "R k"]]]:
        slices, sweep = flat_slices(self.model), Sweep(self.model, self.blocks)
        numbers = {name: number for number, name in enumerate(slices)}
        sketcher = Sketcher(plan.sketch_size, seed=SEED)
        found = zero_vectors(self.model, 0).new_zeros(len(self.weights), plan.sketch_size)
        # Block by block is possible if each block sees nothing but the output of the one before.
        swept = all(self.resources.processes.gather([sweep.holds(self._pieces[0][0][1])]))
        pass_back = sweep.pass_back if swept else partial(stream_gradients, self.model)
        sums = total, totals
        if self.resources.deadline is not None:  # separately, since the current group may be abandoned
            total, totals = (None if whole is None else self._zeros(plan, len(whole.rows)) for whole in sums)

        def take(row: int, name: str, gradient: Float[Tensor, " p"]) -> None:
            self._check_clock()
            gradient, part = gradient.to(found), slices[name]
            if total is not None:
                total.rows[0, part] += gradient.to(total.rows)
            if totals is not None:
                totals.rows[row, part] += gradient.to(totals.rows)
            if scale is not None:
                gradient = gradient * scale[part].to(gradient)
            sketcher.add(gradient, numbers[name], found[row])

        for group, pieces in self._counted():
            found.zero_()
            try:
                for places, piece in pieces:
                    pass_back(piece, self.weights[:, places], take)
            except _Late:
                return
            for whole, own in zip(sums, (total, totals), strict=True):
                if own is not whole:
                    whole.rows.add_(own.rows)
                    own.rows.zero_()
            yield group, found


def sketch_width(length: int) -> int:
    """Return the length of the sketch of a whole vector of this length, a power of two."""
    width = BETWEEN_WIDTH[0]
    while width < BETWEEN_WIDTH[1] and length > SKETCHED_AT_ONCE * width:
        width *= 2
    return width


def largest_share(groups: int, processes: int) -> float:
    """Return the fraction of the groups that the busiest process computes."""
    return ceil(groups / processes) / max(1, groups)


def block_products(vectors: Float[Tensor, "n R P"]) -> Float[np.ndarray, "n R n R"]:
    """Compute ⟨u_{p,r}, u_{q,s}⟩ in float64, a slice of the parameters at a time."""
    n, size, length = vectors.shape
    width = max(1, min(length, SLICE // (n * size)))
    found = sum(inner_products(part) for part in vectors.flatten(0, 1).split(width, dim=1))
    return found.numpy().reshape(n, size, n, size)


def _in_words(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 1 << 28 else f"{size:,} bytes"
