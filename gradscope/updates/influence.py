"""Whose gradient moves whom: the first-order effect of an optimizer step on each token's log π, split by source.

Let G_a be the gradient of the loss's policy part over the tokens with π_old in interval a, G_kl that of its KL part
over all tokens, k = min(1, max_grad_norm / ‖Σ_a G_a + G_kl‖) the clip factor and λ the weight decay. Step n is

    SGD      Δθ = −lr·[k·(Σ_a G_a + G_kl) + λ·θ]
    AdamW    Δθ = −lr·[(1 − β₁)/(1 − β₁ⁿ) · k·(Σ_a G_a + G_kl) ⊘ D + β₁/(1 − β₁ⁿ) · m ⊘ D + λ·θ],    D = √v̂ + eps

where v̂ already includes the clipped gradient. With k and D fixed at their values for the whole step, Δθ is a sum with a
term per source (the intervals, "kl", "momentum", "decay"), and so, exactly, is each token's predicted change
⟨∇ log π_t, Δθ⟩. The relative error against the actual Δ log π falls linearly with the step size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from gradscope.errors import InputError, checked
from gradscope.gradients import (
    BACKWARD,
    FORWARD_MODE,
    Derivative,
    TokenJacobian,
    Vectors,
    refuse_narrow_arithmetic,
)
from gradscope.intervals import interval_labels
from gradscope.objective import PAPER, LossSettings, TokenStatistics, batch_weights, clip_scale
from gradscope.policy import flat_slices, float_parameters, square_norm
from gradscope.resampling import Seed, bootstrap, prompt_clusters, short_of
from gradscope.rollouts import TokenBatch
from gradscope.runs import counted
from gradscope.updates.make_update import old_intervals
from gradscope.updates.movement import resolve, token_keys
from gradscope.updates.step_settings import Moments, StepSettings, read_moments

Number = int | float

BY = "by."
"""Prefix of the columns of contributions."""
SIDES = ("chosen", "rejected")
"""Sources in place of the intervals, where the loss is of chosen and rejected responses."""
STATISTICS = ("mean_abs", "mean", "share")


@dataclass(frozen=True, repr=False, eq=False)
class Influence:
    """The predicted effect of one step on every response token, by source."""

    contributions: pd.DataFrame
    """A row per kept response token with the keys of `updates.movement_table` (`response` to `weight`); each source's
    contribution to the predicted change of log π, in nats, float64: `by.0`, … per interval of π_old (of preferences,
    `by.chosen` and `by.rejected`: per side), `by.kl`, `by.momentum` (AdamW), `by.decay`; their sum `predicted`; and
    `entropy_part`, the contribution of the token's gradient to the predicted change of the mean entropy, in nats, which
    add up to the loss's part."""
    method: Derivative
    """How the derivatives were computed."""
    clip_factor: float
    """The clip factor k on the whole gradient."""
    update_norm: float
    """L2 norm of Δθ over all parameters."""
    entropy: dict[str, float]
    """Predicted change of the kept tokens' mean entropy, in nats, by source."""
    entropy_slopes: Float[np.ndarray, " K"]
    """See `entropy_slopes`."""

    def __repr__(self) -> str:
        return (
            f"Influence({counted(len(self.contributions), 'token')}, sources "
            f"{', '.join(_sources(self.contributions))}; "
            f"‖Δθ‖ = {self.update_norm:.3g}, clip factor {self.clip_factor:.3g}, by {self.method})"
        )


def predict_step(
    J: TokenJacobian,
    loss: LossSettings,
    step: StepSettings,
    moments: Moments | None,
    *,
    edges: Sequence[Number],
    gradients: Float[Tensor, "A P"] | None,
) -> Influence:
    """Compute `influence` for the tokens of a Jacobian.

    step and loss: checked; moments: `read_moments` of the optimizer's state.
    """
    own = SIDES if loss.has_sides else map(str, range(len(interval_labels(edges))))
    names = [*own, "kl", *["momentum"] * (step.optimizer == "adamw"), "decay"]
    J.check_room(len(names) + 2)  # before anything is measured
    refuse_narrow_arithmetic(J.model)
    before = J.statistics
    batch = resolve(J.batch, before, loss)
    cotangents = _cotangents(batch, before, loss, edges, names)
    stacked = torch.stack([*cotangents.values()])
    if gradients is None:
        parts = J.vjp(stacked)
    else:
        rows = nn.functional.pad(gradients, (0, 0, 0, len(names) - len(gradients)))
        parts = Vectors(rows, flat_slices(J.model))
    scaling = _Scaling(J.model, step, moments)
    scaling.keep_held(parts)
    clip_factor, slope = clip_scale(parts.norm_of_sum(), step.max_grad_norm), scaling.entropy_gradient(J)
    # With h the gradient of the mean entropy, a source's effect on it is ⟨h, its part of Δθ⟩. A token's gradient
    # c·∇ log π becomes S(c·∇ log π) in Δθ, with S an entrywise factor, so its effect is c·⟨S(h), ∇ log π⟩.
    entropy = torch.zeros(len(parts), dtype=torch.float64)
    for span, crossed in parts.spans():
        rows, own = parts.rows[:, span], slope.rows[:, span]
        whole = rows.sum(0)
        scaling.scale(rows, names, whole, clip_factor, crossed)
        entropy += (rows.double() @ own[0].double()).cpu()
        scaling.scale(own, ["entropy"], whole, clip_factor, crossed)
    changes, slopes = J.jvp(parts), J.jvp(slope).logprob[0].double().numpy()
    effects = changes.logprob.double().numpy()
    columns = {f"{BY}{name}": values for name, values in zip(names, effects, strict=True)}
    columns |= {"predicted": effects.sum(0), "entropy_part": stacked.sum(0).double().numpy() * slopes}
    contributions = token_keys(batch, before, loss, edges).assign(**columns)
    by_source = dict(zip(names, entropy.tolist(), strict=True))
    return Influence(contributions, changes.how, clip_factor, parts.norm_of_sum(), by_source, slopes)


def entropy_slopes(
    J: TokenJacobian, gradient: Float[Tensor, " P"], *, step: StepSettings, optimizer_state: dict[str, Any] | None
) -> Float[np.ndarray, " K"]:
    """Return the first-order change of the mean entropy in a step per unit of each token's ∂loss/∂log π, in nats.

    gradient: of the loss that determines the step's clip factor and v̂. For another loss with ∂loss/∂log π = c,
    Σ_t c_t·slope_t is the change caused by its gradient in a step with the same scaling.
    """
    scaling = _Scaling(J.model, step, read_moments(J.model, step, optimizer_state))
    parts = (gradient[part] for name, part in flat_slices(J.model).items() if scaling.holds(name))
    clip_factor = clip_scale(square_norm(*parts) ** 0.5, step.max_grad_norm)
    slope = scaling.entropy_gradient(J)
    for span, crossed in slope.spans():
        scaling.scale(slope.rows[:, span], ["entropy"], gradient[span], clip_factor, crossed)
    return J.jvp(slope).logprob[0].double().numpy()


def influence_cost(step: StepSettings, loss: LossSettings = PAPER, *, num_intervals: int = 4) -> float:
    """Return the forward passes that `influence` takes."""
    gradients = num_intervals + bool(loss.kl_coef)
    derivatives = gradients + (step.optimizer == "adamw") + (step.weight_decay != 0)
    return 3 + BACKWARD * (gradients + 1) + FORWARD_MODE * (derivatives + 1)  # one more for the entropy


@checked
def influence_table(
    contributions: pd.DataFrame, *, seed: Seed = 0, confidence: float = 0.95, resamples: int = 1000
) -> pd.DataFrame:
    """Return how much each source moves the tokens of each interval: a row per source and target, and target "all".

    Columns: source (0, 1, …, "kl", …); target (interval of π_old, or "all"); num_tokens of the target; and for the
    source's contribution c to the predicted change Δ of log π (nats) over the target's tokens: mean_abs (of |c|), mean,
    and share = Cov(c, Δ)/Var(Δ). Shares add up to 1 over sources and can be negative; source 0's share of target 3, the
    highest interval, is how much of the movement of likely tokens is caused by unlikely ones. Each has `_lower` and
    `_upper` from resampled prompts (`group`, or `batch` and `group` with a column batch): NaN if fewer than two prompts
    have tokens of the target, or with seed None. share is NaN if Δ is constant.
    """
    sources = _sources(contributions)
    clusters, intervals = prompt_clusters(contributions), contributions["interval"].to_numpy()
    size = sum(name.isdigit() for name in sources) or int(intervals.max()) + 1
    targets = {a: intervals == a for a in range(size)}
    rows = []
    for target, chosen in (targets | {"all": np.full(len(intervals), True)}).items():
        parts = contributions.loc[chosen, [f"{BY}{name}" for name in sources]].to_numpy(np.float64)
        found = _target_statistics(parts, clusters[chosen], int(clusters.max()) + 1, seed, confidence, resamples)
        for name, numbers in zip(sources, found, strict=True):
            row = {"source": int(name) if name.isdigit() else name, "target": target, "num_tokens": len(parts)}
            for statistic, bounds in zip(STATISTICS, numbers, strict=True):
                row |= dict(zip((statistic, f"{statistic}_lower", f"{statistic}_upper"), bounds, strict=True))
            rows.append(row)
    return pd.DataFrame(rows)


@checked
def moved_against(contributions: pd.DataFrame, n: int = 20) -> pd.DataFrame:
    """Return the n tokens predicted to move farthest against their advantage, in that order, with the main source.

    Rows of `contributions` with three more columns: `against`, the distance in nats (> 0); `mover`, the source that
    pushed most in that direction; `mover_change`, its contribution, which exceeds `against` if other sources pushed
    back. Fewer rows if fewer tokens move against their advantage.
    """
    if n < 1:
        raise InputError(f"n is {n}; give the number of tokens to show, 1 or more")
    sources = _sources(contributions)
    wrong = -np.sign(contributions["advantage"].to_numpy(np.float64))
    pushes = contributions[[f"{BY}{name}" for name in sources]].mul(wrong, axis=0)
    table = contributions.assign(against=contributions["predicted"] * wrong)
    table["mover"] = pushes.idxmax(axis=1).str.removeprefix(BY)
    table["mover_change"] = pushes.max(axis=1)
    return table[table["against"] > 0].nlargest(n, "against").reset_index(drop=True)


def _cotangents(
    batch: TokenBatch, before: TokenStatistics, loss: LossSettings, edges: Sequence[Number], names: Sequence[str]
) -> dict[str, Float[Tensor, " K"]]:
    """Return ∂loss/∂log π of each token by source; 0 for sources outside the loss."""
    keep, known = batch.response_mask, {"num_tokens": batch.num_tokens, "entropy": before.entropy}
    weights = batch_weights(before.logprob, batch, loss, **known)
    intervals = old_intervals(batch, edges)[keep]
    policy, kl = -weights.policy[keep] / batch.num_tokens, -weights.kl[keep] / batch.num_tokens
    own = {name: policy * (intervals == int(name)) for name in names if name.isdigit()} | {"kl": kl}
    if loss.has_sides:
        chosen = batch.spread_over_tokens(batch.chosen)[keep] > 0
        own |= dict(zip(SIDES, (policy * chosen, policy * ~chosen), strict=True))
    return {name: own.get(name, torch.zeros_like(kl)) for name in names}


@dataclass(frozen=True)
class _Scaling:
    """How a step turns gradients into parts of Δθ."""

    model: nn.Module
    step: StepSettings
    moments: Moments | None

    def entropy_gradient(self, J: TokenJacobian) -> Vectors:
        """Return the gradient of the mean entropy with respect to the optimizer's parameters."""
        gradient = J.vjp(torch.full((1, J.num_tokens), 1 / J.num_tokens, dtype=torch.float64), of="entropy")
        self.keep_held(gradient)
        return gradient

    def keep_held(self, parts: Vectors) -> None:
        """Zero the entries of parameters outside the optimizer."""
        for name, part in parts.slices.items():
            if not self.holds(name):
                parts.rows[:, part] = 0.0

    def holds(self, name: str) -> bool:
        """Return whether the optimizer holds this parameter."""
        return self.moments is None or name in self.moments.second.exp_avg_sq

    def scale(
        self,
        rows: Float[Tensor, "C p"],
        names: list[str],
        whole: Float[Tensor, " p"],
        clip_factor: float,
        crossed: list[tuple[str, slice, slice]],
    ) -> None:
        """Turn the sources' gradients in a span into parts of Δθ, in place; whole: the total gradient, unclipped."""
        moments, parameters = self.moments, dict(float_parameters(self.model))
        rows.mul_(clip_factor)
        clipped = None if moments is None else whole * clip_factor
        for name, place, own in crossed:
            if not self.holds(name):
                continue
            step = self.step if moments is None else moments.second.settings[name]
            if moments is not None:
                self._precondition(rows[:, place], names, name, own, clipped[place])
            if "decay" in names:
                weights = parameters[name].detach().flatten()[own].to(rows)
                rows[names.index("decay"), place] = step.weight_decay * weights
            rows[:, place] *= -step.learning_rate

    def _precondition(
        self, rows: Float[Tensor, "C p"], names: list[str], name: str, own: slice, clipped: Float[Tensor, " p"]
    ) -> None:
        """Compute (1 − β₁)/(1 − β₁ⁿ) · G ⊘ D by row, and β₁/(1 − β₁ⁿ) · m ⊘ D for momentum; D: the whole step's."""
        moments, beta = self.moments, self.moments.second.settings[name].betas[0]
        inverse = moments.second.scale_part(name, clipped, 1.0, own)
        correction = 1 - beta ** (moments.second.step[name] + 1)
        rows.mul_(inverse)
        rows *= (1 - beta) / correction
        if "momentum" in names and name in moments.first:
            m = moments.first[name].flatten()[own].to(inverse)
            rows[names.index("momentum")] = beta / correction * m * inverse


def _sources(contributions: pd.DataFrame) -> list[str]:
    """Return the names of the sources, in the order of the columns."""
    sources = [name.removeprefix(BY) for name in contributions if name.startswith(BY)]
    if not sources or not {"predicted", "interval", "advantage"} <= set(contributions):
        raise InputError("the table has no contributions; give Influence.contributions")
    return sources


def _target_statistics(
    parts: Float[np.ndarray, "n A"],
    clusters: Int[np.ndarray, " n"],
    num_clusters: int,
    seed: Seed,
    confidence: float,
    resamples: int,
) -> Float[np.ndarray, "A 3 3"]:
    """Return mean |c|, mean c and Cov(c, Δ)/Var(Δ) for each source, with bounds."""
    n, size = parts.shape
    if not n:
        return np.full((size, 3, 3), np.nan)
    means = parts.mean(0)
    centred = parts - means  # centred before squaring, to avoid cancellation
    total = centred.sum(1, keepdims=True)
    columns = np.hstack([np.ones((n, 1)), np.abs(parts), centred, centred * total, total, total**2])
    sums = np.stack([np.bincount(clusters, column, minlength=num_clusters) for column in columns.T], axis=1)

    def evaluate(weights: np.ndarray) -> np.ndarray:
        drawn = weights @ sums
        with np.errstate(invalid="ignore"):  # 0/0 if no token of the target was drawn
            drawn = drawn[:, 1:] / drawn[:, :1]
        size_of, shift, product = (drawn[:, i * size : (i + 1) * size] for i in range(3))
        mean, square = drawn[:, -2:-1], drawn[:, -1:]
        variance = square - mean**2
        varies = variance > 1e-12 * columns[:, -1].mean()
        return np.hstack([size_of, shift + means, (product - shift * mean) / np.where(varies, variance, np.nan)])

    found = bootstrap(evaluate, num_clusters, seed=seed, confidence=confidence, resamples=resamples)
    if short_of(len(np.unique(clusters))):
        found[1:] = np.nan
    return found.reshape(3, 3, size).transpose(2, 1, 0)
