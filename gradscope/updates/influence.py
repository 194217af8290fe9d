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
from pathlib import Path
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
    Resources,
    TokenJacobian,
    Vectors,
    refuse_narrow_arithmetic,
)
from gradscope.intervals import EDGES, interval_labels
from gradscope.objective import PAPER, LossSettings, TokenStatistics, batch_weights, clip_scale
from gradscope.policy import PolicyLike, flat_slices, float_parameters, read_state, square_norm
from gradscope.resampling import Seed, bootstrap, prompt_clusters, short_of
from gradscope.rollouts import BatchLike, TokenBatch, read_inputs
from gradscope.runs import counted
from gradscope.updates.make_update import old_intervals
from gradscope.updates.movement import Movement, movement_table, resolve
from gradscope.updates.step_settings import ANY, SGD, Moments, StepSettings, read_moments

Number = int | float

BY = "by."
"""Prefix of the columns of contributions."""
STATISTICS = ("mean_abs", "mean", "share")


@dataclass(frozen=True, repr=False, eq=False)
class Influence:
    """The predicted effect of one step on every response token, by source."""

    contributions: pd.DataFrame
    """A row per kept response token with the keys of `updates.movement_table` (`response` to `weight`); each source's
    contribution to the predicted change of log π, in nats, float64: `by.0`, … per interval of π_old, `by.kl`,
    `by.momentum` (AdamW), `by.decay`; their sum `predicted`; and `entropy_part`, the contribution of the token's
    gradient to the predicted change of the mean entropy, in nats, which add up to the loss's part."""
    method: Derivative
    """How the derivatives were computed."""
    clip_factor: float
    """The clip factor k on the whole gradient."""
    update_norm: float
    """L2 norm of Δθ over all parameters."""
    entropy: dict[str, float]
    """Predicted change of the kept tokens' mean entropy, in nats, by source; see `_Sources.changes`."""
    entropy_slopes: Float[np.ndarray, " K"]
    """See `entropy_slopes`."""

    def __repr__(self) -> str:
        return (
            f"Influence({counted(len(self.contributions), 'token')}, sources "
            f"{', '.join(_sources(self.contributions))}; "
            f"‖Δθ‖ = {self.update_norm:.3g}, clip factor {self.clip_factor:.3g}, by {self.method})"
        )


@checked
def influence(
    policy: PolicyLike,
    batch: BatchLike,
    *,
    loss: LossSettings = PAPER,
    step: StepSettings = SGD,
    optimizer_state: dict[str, Any] | str | Path | None = None,
    edges: Sequence[Number] = EDGES,
    gradients: Float[Tensor, "A P"] | None = None,
    resources: Resources | None = None,
) -> Influence:
    """Predict the effect of `apply_update(policy, batch, "all", …)` on each token's log π, by source, without a step.

    The whole batch is one mini-batch. Costs a forward pass, a forward and backward pass per source and for the mean
    entropy, and three forward passes for each of these in forward mode (see `TokenJacobian.jvp` for models without it,
    as reported by a UserWarning and `method`). The policy is restored bit for bit, even if the call raises. Memory
    beside the model, its activations and the given state: a vector as long as the parameters per source (SGD: intervals
    + 2;
    AdamW: intervals + 3), and 2 more.

    Args:
        batch: unknown old_logprobs are replaced by the policy's own; advantages come from `resolve_advantages`.
        optimizer_state: AdamW's `state_dict()`: continues from its moments and step counts with the settings of `step`,
            and does not move other parameters. None: fresh, with v = 0, so that the step is lr·sign(gradient): entries
            in which the sources' gradients cancel still move by lr, and each source contributes its gradient over their
            sum, without bound. The contributions still add up, but say little about who moved whom, so give a state
            that has taken many steps (see AdamWState).
        gradients: of the loss's policy part for each interval, if known and without a KL part; None: computed here.
        resources: if the vectors exceed its bytes, they go to a scratch file; None: no limit.

    Raises:
        InputError: the weights are below float32, the batch has no response tokens or advantages, the optimizer state
            does not fit, the gradient is not finite (so no step would be taken), or the disk has no room for a scratch
            file.
    """
    J = TokenJacobian(*read_inputs(policy, batch), resources or Resources(ANY))
    state = read_state(optimizer_state) if isinstance(optimizer_state, str | Path) else optimizer_state
    step.check()
    loss.check()
    return predict_step(J, loss, step, read_moments(J.model, step, state), edges=edges, gradients=gradients)


def predict_step(
    J: TokenJacobian,
    loss: LossSettings,
    step: StepSettings,
    moments: Moments | None,
    *,
    edges: Sequence[Number],
    gradients: Float[Tensor, "A P"] | None,
) -> Influence:
    """Compute `influence` for the tokens of a Jacobian. moments: `read_moments` of the optimizer's state."""
    names = [*map(str, range(len(interval_labels(edges)))), "kl", *["momentum"] * (step.optimizer == "adamw"), "decay"]
    J.check_room(len(names) + 2)  # before anything is measured
    refuse_narrow_arithmetic(J.model)
    before = J.statistics
    batch = resolve(J.batch, before)
    cotangents = _cotangents(batch, before, loss, edges, names)
    found, slopes, entropy, *how = _Sources(J, cotangents, step, moments, gradients).changes()
    own = sum(cotangents.values()).double().numpy() * slopes
    parts = pd.DataFrame({f"{BY}{name}": values for name, values in zip(cotangents, found, strict=True)})
    keys = _keys(batch, before, loss, edges)
    contributions = pd.concat([keys, parts.assign(predicted=found.sum(0), entropy_part=own)], axis=1)
    return Influence(contributions, *how, dict(zip(cotangents, entropy.tolist(), strict=True)), slopes)


def entropy_slopes(
    J: TokenJacobian, gradient: Float[Tensor, " P"], *, step: StepSettings, optimizer_state: dict[str, Any] | None
) -> Float[np.ndarray, " K"]:
    """Return the first-order change of the mean entropy in a step per unit of each token's ∂loss/∂log π, in nats.

    gradient: of the loss that determines the step's clip factor and v̂. For another loss with ∂loss/∂log π = c,
    Σ_t c_t·slope_t is the change caused by its gradient in a step with the same scaling.
    """
    sources = _Sources(J, {}, step, read_moments(J.model, step, optimizer_state), None)
    parts = (gradient[part] for name, part in flat_slices(J.model).items() if sources.holds(name))
    clip_factor = clip_scale(square_norm(*parts) ** 0.5, step.max_grad_norm)
    slope = sources.entropy_slope()
    for span, crossed in slope.spans():
        sources._shape(slope.rows[:, span], ["entropy"], gradient[span], clip_factor, crossed)
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
    targets = {a: intervals == a for a in range(sum(name.isdigit() for name in sources))}
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
    weights, keep = batch_weights(before.logprob, batch, loss, num_tokens=batch.num_tokens), batch.response_mask
    intervals = old_intervals(batch, edges)[keep]
    policy, kl = -weights.policy[keep] / batch.num_tokens, -weights.kl[keep] / batch.num_tokens
    own = {name: policy * (intervals == int(name)) for name in names if name.isdigit()} | {"kl": kl}
    return {name: own.get(name, torch.zeros_like(kl)) for name in names}


@dataclass(frozen=True)
class _Sources:
    """The sources of a step, and how their gradients become contributions to Δθ."""

    jacobian: TokenJacobian
    cotangents: dict[str, Float[Tensor, " K"]]
    """By source, see `_cotangents`."""
    step: StepSettings
    moments: Moments | None
    known: Float[Tensor, "A P"] | None
    """Gradients of the first sources, if known and the others have none."""

    def changes(
        self,
    ) -> tuple[Float[np.ndarray, "C K"], Float[np.ndarray, " K"], Float[Tensor, " C"], Derivative, float, float]:
        """Return each source's effect on each token, the effects of a unit of each token's ∂loss/∂log π and of each
        source on the mean entropy, the kind of derivative, the clip factor, and the norm of Δθ.

        With h the gradient of the mean entropy, a source's effect is ⟨h, its part of Δθ⟩. A token's gradient c·∇ log π
        becomes S(c·∇ log π) in Δθ, with S an entrywise factor, so its effect is c·⟨S(h), ∇ log π⟩.
        """
        J, cotangents = self.jacobian, torch.stack(list(self.cotangents.values()))
        if self.known is None:
            parts = J.vjp(cotangents)
        else:
            rows = nn.functional.pad(self.known, (0, 0, 0, len(cotangents) - len(self.known)))
            parts = Vectors(rows, flat_slices(J.model))
        self._keep_held(parts)
        clip_factor = clip_scale(parts.norm_of_sum(), self.step.max_grad_norm)
        slope = self.entropy_slope()
        entropy = torch.zeros(len(parts), dtype=torch.float64)
        for span, crossed in parts.spans():
            rows, own = parts.rows[:, span], slope.rows[:, span]
            whole = rows.sum(0)
            self._shape(rows, list(self.cotangents), whole, clip_factor, crossed)
            entropy += (rows.double() @ own[0].double()).cpu()
            self._shape(own, ["entropy"], whole, clip_factor, crossed)
        changes, by_token = J.jvp(parts), J.jvp(slope).logprob[0].double()
        update_norm = parts.norm_of_sum()
        return changes.logprob.double().numpy(), by_token.numpy(), entropy, changes.how, clip_factor, update_norm

    def entropy_slope(self) -> Vectors:
        """Return the gradient of the mean entropy with respect to the optimizer's parameters."""
        J = self.jacobian
        slope = J.vjp(torch.full((1, J.num_tokens), 1 / J.num_tokens, dtype=torch.float64), of="entropy")
        self._keep_held(slope)
        return slope

    def _keep_held(self, parts: Vectors) -> None:
        """Zero the entries of parameters outside the optimizer."""
        for name, part in parts.slices.items():
            if not self.holds(name):
                parts.rows[:, part] = 0.0

    def holds(self, name: str) -> bool:
        """Return whether the optimizer holds this parameter."""
        return self.moments is None or name in self.moments.second.exp_avg_sq

    def _shape(
        self,
        rows: Float[Tensor, "C p"],
        names: list[str],
        whole: Float[Tensor, " p"],
        clip_factor: float,
        crossed: list[tuple[str, slice, slice]],
    ) -> None:
        """Turn the sources' gradients in a span into parts of Δθ, in place; whole: the total gradient, unclipped."""
        moments, parameters = self.moments, dict(float_parameters(self.jacobian.model))
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


def _keys(batch: TokenBatch, before: TokenStatistics, loss: LossSettings, edges: Sequence[Number]) -> pd.DataFrame:
    """Return the key columns of `movement_table`."""
    table = movement_table([Movement("all", batch, before, before, [], 0.0, loss)], edges=edges)
    return table.drop(columns=[name for name in table if name.startswith("delta_")])


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
