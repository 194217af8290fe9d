"""What every α and η of a grid would do to every token of a batch, to first order, from one set of gradients.

The edges of the intervals of π_old and the grid's η cut the tokens into cells. Per cell c, three gradients of the loss
are taken once: that of its policy part (plain), of the policy part with each weight times π_old (weighted), and of its
KL part. Reweight's gradient is linear in α (Eq. 4, arXiv:2505.12929), so over any cells A it is, exactly,

    g(α, A) = Σ_{c ∈ A} [(1 − α)·plain_c + α·weighted_c + KL_c].

Any other weighting of one optimizer step has its own gradients, one per interval, policy and KL part in one.

A setting takes one optimizer step, over all cells, or Lopti's two, over those below η and the others (Alg. 1). Both are
simulated in the coefficients of these gradients, of AdamW's momentum and of the weights (for decay): the norm to clip
comes from the Gram matrix, and each token's Δ log π is a sum of its responses to them, by forward mode; these are taken
along the sums of those gradients that every setting weighs alike. First order
means that all gradients are those before the first step: Lopti's second pass, too, is linearised there. AdamW's
denominator is frozen at that of the plain step. The whole batch is one mini-batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import sqrt
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from gradscope.errors import InputError
from gradscope.gradients import (
    BACKWARD,
    FORWARD_MODE,
    Derivative,
    gram,
    predict_changes,
    vector_bytes,
    vectors_within,
    weighted_gradients,
)
from gradscope.intervals import EDGES, interval_labels
from gradscope.objective import (
    PAPER,
    LossSettings,
    Method,
    TokenStatistics,
    Weighting,
    batch_weights,
    clip_scale,
    lopti_split,
    make_weighting,
    spell_out,
    weigh_step,
)
from gradscope.policy import PART, Policy, flat_slices, flat_spans, float_parameters
from gradscope.rollouts import TokenBatch
from gradscope.runs import Progress
from gradscope.updates.movement import measure_start
from gradscope.updates.step import SGD, Moments, StepSettings, read_moments
from gradscope.updates.variants import old_intervals

Number = int | float

KINDS = 3
"""Gradients per cell: plain, weighted, KL."""


@dataclass(frozen=True)
class Setting:
    """A choice of α and η, or of another weighting."""

    alpha: Number | None = None
    """α of Advantage Reweighting (Eq. 4); None: off."""
    eta: Number | None = None
    """η of Lopti (Alg. 1); None: off."""
    weighting: Weighting | None = None
    """One of one optimizer step, in place of both."""
    method: str = ""
    """What the user called it; "": by its α and η."""

    @property
    def name(self) -> str:
        if self.method:
            return self.method
        if self.weighting is not None:
            return str(self.weighting)
        parts = [f"{word}={value:g}" for word, value in (("α", self.alpha), ("η", self.eta)) if value is not None]
        return ", ".join(parts) or "plain"

    @property
    def variant(self) -> str:
        """Name of the setting's variant, see `variants`."""
        if self.eta is None:
            return "all" if self.alpha is None else "reweight"
        return "lopti" if self.alpha is None else "reweight-lopti"


PLAIN = Setting()


def make_grid(
    alphas: Iterable[Number | None], etas: Iterable[Number | None], methods: Iterable[str] = ()
) -> list[Setting]:
    """Every pair of α and η, each once, off before on, behind PLAIN, which all are compared with; an α of 0 is off.

    methods: weightings to follow, as `make_weighting` takes them, a parameter's values with a slash between them.
    Raises InputError for what is no weighting, or one of several optimizer steps other than Lopti's.

    >>> [setting.name for setting in make_grid([0, 0.3], [None, 0.5])]
    ['plain', 'η=0.5', 'α=0.3', 'α=0.3, η=0.5']
    >>> [setting.name for setting in make_grid([], [], ["top-entropy:q=0.1/.4", "reweight"])]
    ['plain', 'top-entropy:q=0.1', 'top-entropy:q=.4', 'reweight']
    """
    alphas, etas = sorted(alphas, key=bool), sorted(etas, key=lambda eta: eta is not None)
    for alpha, eta in product(alphas, etas):
        Method(alpha, eta)  # refuses what neither takes
    pairs = [Setting(alpha or None, eta) for alpha in alphas for eta in etas]
    grid = list(
        dict.fromkeys([PLAIN, *pairs, *(_method_setting(name) for text in methods for name in spell_out(text))])
    )
    if len(grid) < 2:
        raise InputError("the grid has nothing to compare with the plain loss; give an alpha above 0, an eta, a method")
    return grid


def _method_setting(name: str) -> Setting:
    weighting = make_weighting(name)
    if (pair := weighting.alpha_and_eta) is not None:
        setting = Setting(pair[0] or None, pair[1])
        return setting if setting == PLAIN else replace(setting, method=name)
    if weighting.passes.lopti_eta is not None:
        raise InputError(f"{name} takes two optimizer steps over tokens drawn at random; gradscope compare has it")
    return Setting(weighting=weighting, method=name)


@dataclass(frozen=True)
class Cells:
    """The tokens of a batch by interval of π_old and by the side of every η that they are on."""

    of: Int[Tensor, "B S"]
    """Number of each kept token's cell; −1 elsewhere."""
    interval: Int[np.ndarray, " C"]
    """Interval of π_old of each cell."""
    below: dict[Number, Bool[np.ndarray, " C"]]
    """For each η: whether the cell is in Lopti's first pass."""

    @property
    def sides(self) -> Int[np.ndarray, " C"]:
        """Number of each cell's sides of all η, in order of their first cell: cells of one number move together."""
        patterns = [tuple(row) for row in np.array([*self.below.values()]).T] or [()] * len(self.interval)
        numbers = {pattern: number for number, pattern in enumerate(dict.fromkeys(patterns))}
        return np.array([numbers[pattern] for pattern in patterns])


def make_cells(batch: TokenBatch, etas: Iterable[Number], edges: Sequence[Number] = EDGES) -> Cells:
    """The cells that have tokens; old_logprobs must be known.

    Sides are told as the trainer tells them, so that no token at an edge is on another side by rounding.
    """
    keep, etas = batch.response_mask, list(etas)
    low = [lopti_split(batch.old_logprobs, keep, eta=eta)[0] for eta in etas]
    keys = torch.stack([old_intervals(batch, edges), *low])[:, keep]
    patterns, cell = keys.unique(dim=1, return_inverse=True)
    below = {eta: row.astype(bool) for eta, row in zip(etas, patterns[1:].numpy(), strict=True)}
    of = torch.full(keep.shape, -1).masked_scatter(keep, cell)
    return Cells(of, patterns[0].numpy(), below)


def cell_cotangents(
    cells: Cells, batch: TokenBatch, logprobs: Float[Tensor, "B S"], loss: LossSettings
) -> Float[Tensor, "R B S"]:
    """∂loss/∂log π of each token, a row per gradient: plain of each cell, then weighted, then KL.

    logprobs: log π of the policy before the step, nats; advantages and old_logprobs of the batch must be known.
    """
    weights = batch_weights(logprobs, batch, loss, num_tokens=batch.num_tokens)
    kinds = torch.stack([weights.policy, weights.policy * batch.old_logprobs.exp(), weights.kl]) / -batch.num_tokens
    inside = cells.of == torch.arange(len(cells.interval))[:, None, None]
    return (kinds[:, None] * inside).flatten(0, 1)


def weighting_cotangents(
    weightings: Iterable[Weighting],
    batch: TokenBatch,
    before: TokenStatistics,
    loss: LossSettings,
    edges: Sequence[Number] = EDGES,
) -> Float[Tensor, "R B S"]:
    """∂loss/∂log π of each token with the weighting's weights in the policy part's place, a row per interval of each.

    The KL part is the plain loss's, of the tokens that no mask leaves out of training. Raises InputError for a
    weighting that the batch has no columns for.
    """
    kl = batch_weights(before.logprob, batch, loss, num_tokens=batch.num_tokens).kl
    known = {"entropy": before.entropy, "sampler_logprobs": batch.sampler_logprobs}
    old, keep = batch.old_logprobs, batch.response_mask
    inside = old_intervals(batch, edges) == torch.arange(len(interval_labels(edges)))[:, None, None]
    rows = [kl.new_empty(0, *kl.shape)]
    for weighting in weightings:
        weights = weigh_step(weighting, before.logprob, old, batch.advantages, keep, loss, **known)
        [(_, trained)] = weighting.passes.groups(old, keep)
        rows.append((weights + kl * trained) * inside / -batch.num_tokens)
    return torch.cat(rows)


@dataclass(frozen=True)
class Prediction:
    """What one setting's step does, to first order."""

    delta_logprob: Float[np.ndarray, " K"]
    """Change of log π of each kept token of `Linearisation.judged`, by row and column, nats. Δ of the log odds has the
    same sign."""
    gradient_shares: Float[np.ndarray, " A"]
    """⟨G_a, G⟩/‖G‖² of each interval; G is the sum of the passes' gradients, clipped. NaN for G = 0."""
    cosine: float
    """Cosine of G and the gradient of the plain loss."""
    num_steps: int
    """Optimizer steps: passes that have a token."""
    adds_up: bool
    """Whether these are two that move θ exactly as the one without η does, so that η is not judged."""


@dataclass(frozen=True, repr=False, eq=False)
class Linearisation:
    """One batch's gradients and responses: what predicts every setting."""

    batch: TokenBatch
    """With its advantages, and with π_old."""
    judged: TokenBatch
    """Its responses that have an advantage: of the others no direction is right."""
    cells: Cells
    gram: Float[np.ndarray, "R R"]
    """Inner products of the gradients, rows as of `cell_cotangents`, then `weighting_cotangents`."""
    responses: Float[np.ndarray, "M+2 K"]
    """Change of each judged token's log π by the sums of gradients (`_sums`), the momentum and the weights,
    preconditioned as the step's direction is; nats. The last two are 0 where the optimizer has neither momentum nor
    decay."""
    step: StepSettings
    steps_taken: int
    """By the optimizer, before."""
    method: Derivative
    """How the responses were derived."""
    num_intervals: int = 4
    weightings: tuple[Weighting, ...] = ()
    """Those that settings may have."""

    def passes(self, setting: Setting) -> list[Float[np.ndarray, " R"]]:
        """The gradient of each of the setting's passes, in coefficients; a pass without tokens is none."""
        own = np.zeros((len(self.weightings), self.num_intervals))
        if setting.weighting is not None:
            own[self.weightings.index(setting.weighting)] = 1.0
            return [np.concatenate([np.zeros(KINDS * len(self.cells.interval)), own.ravel()])]
        everything = np.full(len(self.cells.interval), True)
        groups = [everything]
        if setting.eta is not None:
            low = self.cells.below[setting.eta]
            groups = [low, ~low]
        alpha = setting.alpha or 0.0
        parts = [((1 - alpha) * group, alpha * group, group) for group in groups if group.any()]
        return [np.concatenate([*part, own.ravel()]) for part in parts]

    def predict(self, setting: Setting) -> Prediction:
        """Take the setting's step in coefficients. Its η must be one that the linearisation was made for."""
        passes = self.passes(setting)
        total = sum(self._clip(gradient) * gradient for gradient in passes)
        products, plain = total * (self.gram @ total), sum(self.passes(PLAIN))
        intervals = (np.tile(self.cells.interval, KINDS), np.tile(np.arange(self.num_intervals), len(self.weightings)))
        square, intervals = products.sum(), np.concatenate(intervals)
        with np.errstate(invalid="ignore", divide="ignore"):  # no gradient at all
            shares = np.bincount(intervals, products, self.num_intervals) / square
            cosine = total @ self.gram @ plain / sqrt(max(square, 0.0) * max(plain @ self.gram @ plain, 0.0))
        moved, whole = self._move(passes), self._move(self.passes(replace(setting, eta=None)))
        adds_up = len(passes) > 1 and np.array_equal(moved, whole)
        # Within a sum all coefficients are the same.
        _, first = np.unique(_sums(self.cells, self.num_intervals, self.weightings), return_index=True)
        moves = np.concatenate([moved[first], moved[-2:]])
        return Prediction(moves @ self.responses, shares, float(cosine), len(passes), adds_up)

    def _move(self, passes: Sequence[Float[np.ndarray, " R"]]) -> Float[np.ndarray, " R+2"]:
        """θ after the passes minus θ before, in coefficients of what `responses` are to."""
        step, rate, size = self.step, self.step.learning_rate, len(self.gram)
        beta = step.betas[0] if step.optimizer == "adamw" else 0.0
        moved, momentum = np.zeros(size + 2), np.eye(size + 2)[size]
        for count, gradient in enumerate(passes, start=self.steps_taken + 1):
            momentum *= beta
            momentum[:size] += (1 - beta) * self._clip(gradient) * gradient
            moved *= 1 - rate * step.weight_decay
            moved[-1] -= rate * step.weight_decay
            moved -= rate / (1 - beta**count) * momentum
        return moved

    def _clip(self, gradient: Float[np.ndarray, " R"]) -> float:
        return clip_scale(_norm(gradient, self.gram), self.step.max_grad_norm)


def linearise(
    policy: Policy,
    batch: TokenBatch,
    *,
    etas: Iterable[Number | None] = (),
    weightings: Sequence[Weighting] = (),
    loss: LossSettings = PAPER,
    step: StepSettings = SGD,
    optimizer_state: dict[str, Any] | None = None,
    edges: Sequence[Number] = EDGES,
    memory: int | None = None,
    progress: bool | Progress = False,
) -> Linearisation:
    """Take a batch's gradients by cell and every token's response to them; no step is taken.

    etas, weightings: those that settings will have. Unknown old_logprobs are the policy's own, advantages those of
    `resolve_advantages`; without ref_logprobs there is no KL part. optimizer_state: see `apply_update`; None is a
    fresh AdamW, whose sign step has another denominator under each setting, so that the plain one's predicts little.

    A gradient costs a backward pass; there are two per cell, and three with KL, and one per interval of each
    weighting. Three forward passes in forward mode go to each sum: two, or three, for each side of the η, and one for
    each weighting. Responses without an advantage are left out where they change
    nothing. Memory besides the model, its activations and the given state: a vector as long as the parameters for
    each of three gradients per cell, and three more. Where that is over `memory` bytes (None: any amount is there),
    they lie in a scratch file, and each gradient takes a forward pass of its own. The policy is as it was, bit for
    bit. Raises InputError for weights below float32, advantages that are unknown, NaN or all 0, a state that does
    not fit, a gradient that is not finite, and where the scratch file finds no room.
    """
    step.check()
    loss.check()
    if loss.reweight_alpha is not None:
        raise InputError(f"reweight_alpha is {loss.reweight_alpha}; the settings of the grid say α; leave it None")
    moments = read_moments(policy.model, step, optimizer_state)
    steps_taken = _steps_taken(moments)
    batch, before = measure_start(policy, batch, step)
    cells = make_cells(batch, dict.fromkeys(eta for eta in etas if eta is not None), edges)
    weighed = weighting_cotangents(weightings, batch, before, loss, edges)
    cotangents = torch.cat([cell_cotangents(cells, batch, before.logprob, loss), weighed])
    passes = {"micro_batch_size": step.micro_batch_size, "progress": progress}
    trained = trained_rows(batch, loss)
    # Two rows more, without a cotangent: for momentum and weights.
    cotangents = nn.functional.pad(cotangents[:, trained], (0, 0, 0, 0, 0, 2))
    rows = _make_gradients(policy.model, batch.select(trained), cotangents, memory, passes)
    gram = _make_directions(policy.model, rows, len(cells.interval), step, moments)
    judged = batch.select(_rows_with_advantage(batch))
    number = _add_up(rows, _sums(cells, len(interval_labels(edges)), weightings))
    responses, method = predict_changes(policy.model, judged, rows[:number], **passes)
    kept = responses[:, judged.response_mask].double().numpy()
    found = (batch, judged, cells, gram, kept, step, steps_taken, method)
    return Linearisation(*found, len(interval_labels(edges)), tuple(weightings))


def linearise_cost(
    num_cells: int, num_sides: int, step: StepSettings, loss: LossSettings = PAPER, *, one_by_one: bool = False
) -> float:
    """Forward passes over the batch that take as long as `linearise` does; one_by_one: where memory is too little.

    num_sides: sides of all η together that cells are on, see `Cells`.
    """
    kinds = KINDS if loss.kl_coef else KINDS - 1
    gradients, others = num_cells * kinds, (step.optimizer == "adamw") + bool(step.weight_decay)
    return 1 + (gradients if one_by_one else 1) + BACKWARD * gradients + FORWARD_MODE * (num_sides * kinds + others)


def _make_gradients(
    model: nn.Module, batch: TokenBatch, cotangents: Float[Tensor, "Q B S"], memory: int | None, passes: dict[str, Any]
) -> Float[Tensor, "Q P"]:
    """Weighted gradients, in a scratch file where they exceed `memory` bytes."""
    if memory is None or (len(cotangents) + 1) * vector_bytes(model) <= memory:
        return weighted_gradients(model, batch, cotangents, **passes)
    rows = vectors_within(model, len(cotangents), 0)
    for row, own in zip(rows, cotangents, strict=True):
        # Each with its own forward passes, so that one row at a time is written to.
        if own.any():
            weighted_gradients(model, batch, own[None], out=row[None], **passes)
    return rows


def trained_rows(batch: TokenBatch, loss: LossSettings) -> Int[Tensor, " b"]:
    """Responses that the loss can have a gradient of: all with a KL part, else those that have an advantage.

    Raises InputError where no response has an advantage.
    """
    rows = _rows_with_advantage(batch)
    return torch.arange(len(batch)) if loss.kl_coef and batch.ref_logprobs is not None else rows


def _rows_with_advantage(batch: TokenBatch) -> Int[Tensor, " b"]:
    rows = ((batch.advantages != 0) & batch.response_mask).any(1).nonzero()[:, 0]
    if not len(rows):
        raise InputError("every advantage is 0, so no direction is right; give rollouts whose rewards differ")
    return rows


def _steps_taken(moments: Moments | None) -> int:
    counts = {0} if moments is None else set(moments.second.step.values())
    if len(counts) > 1:
        raise InputError(
            f"the optimizer's parameters have taken {min(counts)} to {max(counts)} steps; a prediction needs one count "
            "for all; give the state of parameters that were always trained together"
        )
    return counts.pop()


def _make_directions(
    model: nn.Module, rows: Float[Tensor, "Q P"], num_cells: int, step: StepSettings, moments: Moments | None
) -> Float[np.ndarray, "Q-2 Q-2"]:
    """The gradients' Gram matrix; then, in place, precondition them and fill in momentum and weights, the last two."""
    slices, parameters = flat_slices(model), dict(float_parameters(model))
    held = parameters if moments is None else moments.second.exp_avg_sq
    for name in slices.keys() - held.keys():
        rows[:, slices[name]] = 0.0
    products = gram(rows[:-2]).numpy()
    whole = np.zeros(len(products))
    whole[: KINDS * num_cells] = np.repeat([1.0, 0.0, 1.0], num_cells)
    clip_factor = clip_scale(_norm(whole, products), step.max_grad_norm)
    for span, crossed in flat_spans(model, PART):
        part = rows[:, span]
        plain = None if moments is None else clip_factor * (torch.from_numpy(whole).to(rows) @ part[:-2])
        for name, place, own in crossed:
            if name not in held:
                continue
            if moments is not None:
                if name in moments.first:
                    part[-2, place] = moments.first[name].flatten()[own].to(rows)
                part[:, place] *= moments.second.scale_part(name, plain[place], 1.0, own)
            if step.weight_decay:
                part[-1, place] = parameters[name].detach().flatten()[own].to(rows)
    return products


def _sums(cells: Cells, num_intervals: int, weightings: Sequence[Weighting]) -> Int[np.ndarray, " R"]:
    """Number of the sum that each gradient is part of, in order of the sums' first gradients."""
    count = cells.sides.max() + 1
    kinds = count * np.arange(KINDS)[:, None] + cells.sides
    return np.concatenate([kinds.ravel(), KINDS * count + np.repeat(np.arange(len(weightings)), num_intervals)])


def _add_up(rows: Float[Tensor, "R+2 P"], sums: Int[np.ndarray, " R"]) -> int:
    """Put the sums of the rows into the first ones, the last two rows behind them, in place; how many rows there are.

    A sum's place is no later than its first row, so what lies there is its own or has been added already.
    """
    parts = [np.flatnonzero(sums == number).tolist() for number in range(sums.max() + 1)]
    for place, (first, *others) in enumerate([*parts, [len(rows) - 2], [len(rows) - 1]]):
        if first != place:
            rows[place] = rows[first]
        for other in others:
            rows[place] += rows[other]
    return len(parts) + 2


def _norm(gradient: Float[np.ndarray, " R"], products: Float[np.ndarray, "R R"]) -> float:
    """products: the Gram matrix of what the gradient's coefficients are of."""
    square = gradient @ products @ gradient
    # Rounding may leave a sum that cancels below 0; NaN stays.
    return sqrt(square) if not square < 0 else 0.0
