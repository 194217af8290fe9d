"""Whose gradient moves whom: what one optimizer step does to each token's log π, to first order, split by its sources.

With G_a the gradient of the loss's policy part over the tokens whose π_old lies in interval a, G_kl that of its KL part
over all tokens, k = min(1, max_grad_norm / ‖Σ_a G_a + G_kl‖) the clip factor and λ the weight decay, step n moves by

    SGD      Δθ = −lr·[k·(Σ_a G_a + G_kl) + λ·θ]
    AdamW    Δθ = −lr·[(1 − β₁)/(1 − β₁ⁿ) · k·(Σ_a G_a + G_kl) ⊘ D + β₁/(1 − β₁ⁿ) · m ⊘ D + λ·θ],    D = √v̂ + eps

where v̂ already holds the clipped gradient. With k and D frozen at the whole step's, Δθ is a sum with a term per source
(the intervals, "kl", "momentum", "decay"), and so is each token's predicted change ⟨∇ log π_t, Δθ⟩: exactly, whatever
the terms share. Against the actual Δ log π the prediction errs by a share that falls linearly with the step size.
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
from gradscope.updates.make_update import old_intervals
from gradscope.updates.movement import Movement, movement_table, resolve
from gradscope.updates.step_settings import ANY, SGD, Moments, StepSettings, read_moments

Number = int | float

BY = "by."
"""Prefix of the columns of contributions."""
STATISTICS = ("mean_abs", "mean", "share")


@dataclass(frozen=True, repr=False, eq=False)
class Influence:
    """One step's predicted effect on every response token, by its sources."""

    contributions: pd.DataFrame
    """A row per kept response token with the keys of `updates.movement_table` (`response` to `weight`); then for each
    source its part of the predicted change of log π, nats, float64: `by.0`, … per interval of π_old, `by.kl`,
    `by.momentum` (AdamW), `by.decay`; and `predicted`, their sum. And `entropy_part`, what this token's own gradient
    adds to the predicted change of the kept tokens' mean entropy, nats: all of them add up to the loss's part."""
    method: Derivative
    """How the derivatives were taken."""
    clip_factor: float
    """k: what clipping the gradient's norm multiplied the whole gradient by."""
    update_norm: float
    """L2 norm of Δθ over all parameters."""
    entropy: dict[str, float]
    """Predicted change of the mean entropy of the kept tokens, nats, by source; see `_Sources.changes`."""
    entropy_slopes: Float[np.ndarray, " K"]
    """See `entropy_slopes`."""

    def __repr__(self) -> str:
        return (
            f"Influence({len(self.contributions)} tokens, sources {', '.join(_sources(self.contributions))}; "
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
    """Predict what `apply_update(policy, batch, "all", …)` does to log π of each token, by source; no step is taken.

    The whole batch is one mini-batch. Costs a forward pass, a forward and backward pass per source and for the mean
    entropy, and three forward passes for each of these in forward mode; see `TokenJacobian.jvp` for models without it,
    of which a UserWarning and `method` tell. The policy is as it was, bit for bit, also if the call raises. Memory
    besides the model, its activations and the given state: a vector as long as the parameters for each source (SGD:
    intervals + 2; AdamW: intervals + 3), and 2 more.

    Args:
        batch: unknown old_logprobs are the policy's own, advantages those of `resolve_advantages`.
        optimizer_state: what AdamW's `state_dict()` saved; its moments and step counts are gone on from, with the
            numbers of `step`, and a parameter that it does not hold is not moved. None: fresh, v = 0, where the whole
            step is lr·sign(gradient): an entry in which the sources' gradients cancel then still moves by lr, and each
            source counts with its gradient over their sum, without bound. The contributions add up all the same, but
            they say little of who moved whom: give a state that has taken many steps (see AdamWState).
        gradients: of the loss's policy part over the tokens of each interval, where there is no KL part and they are
            known; None: made here.
        resources: where the vectors are over its bytes, they lie in a scratch file; None: any amount is there.

    Raises:
        InputError: for weights below float32, for a batch without response tokens or advantages, for an optimizer
            state that does not fit, for a gradient that is not finite, with which no step is taken, and where a scratch
            file finds no room.
    """
    J = TokenJacobian(*read_inputs(policy, batch), resources or Resources(ANY))
    given = {"loss": loss, "step": step, "optimizer_state": optimizer_state}
    return predict_step(J, edges=edges, gradients=gradients, **given)


def predict_step(
    J: TokenJacobian,
    *,
    loss: LossSettings = PAPER,
    step: StepSettings = SGD,
    optimizer_state: dict[str, Any] | str | Path | None = None,
    edges: Sequence[Number] = EDGES,
    gradients: Float[Tensor, "A P"] | None = None,
) -> Influence:
    """`influence`, of the tokens of a Jacobian."""
    optimizer_state = read_state(optimizer_state) if isinstance(optimizer_state, str | Path) else optimizer_state
    step.check()
    loss.check()
    moments = read_moments(J.model, step, optimizer_state)
    names = [*map(str, range(len(interval_labels(edges)))), "kl", *_of_the_step(step)]
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
    """Return how much a step changes the mean entropy of all tokens, to first order, per unit of each token's
    ∂loss/∂log π, nats.

    gradient: of a loss, whose clip factor and v̂ the step has, whatever else it is made of. With c the ∂loss/∂log π of
    the tokens of another loss, Σ_t c_t·slope_t is what its own gradient changes in a step that is scaled as this one.
    """
    sources = _Sources(J, {}, step, read_moments(J.model, step, optimizer_state), None)
    parts = (gradient[part] for name, part in flat_slices(J.model).items() if sources.holds(name))
    clip_factor = clip_scale(square_norm(*parts) ** 0.5, step.max_grad_norm)
    slope = sources.entropy_slope()
    for span, crossed in slope.spans():
        sources._shape(slope.rows[:, span], ["entropy"], gradient[span], clip_factor, crossed)
    return J.jvp(slope).logprob[0].double().numpy()


@checked
def influence_table(
    contributions: pd.DataFrame, *, seed: Seed = 0, confidence: float = 0.95, resamples: int = 1000
) -> pd.DataFrame:
    """How much each source moves the tokens of each interval, a row per source and target; the targets end with "all".

    Columns: source (0, 1, …, "kl", …), target (interval of π_old, or "all"), num_tokens (of the target); over the
    target's tokens, of the source's contribution c to the predicted change Δ of log π (nats): mean_abs (of |c|), mean,
    and share = Cov(c, Δ)/Var(Δ), which over the sources adds up to 1 and can be negative: so source 0's share of
    target 3, the highest interval, says how much of likely tokens' movement unlikely ones cause. Each with `_lower` and
    `_upper`, from redrawn prompts (`group`, or `batch` and `group` where there is a column batch): NaN where fewer than
    two have tokens of the target, and all with the seed None. share is NaN where Δ does not vary.
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
    """The n tokens predicted to move farthest against their own advantage, farthest first, and by whom.

    Rows of `contributions` with three columns more: `against`, how far against, nats > 0; `mover`, the source that
    pushed most that way; `mover_change`, by how much, which exceeds `against` where other sources pushed back. Fewer
    rows where fewer tokens move against their advantage.
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


def _of_the_step(step: StepSettings) -> tuple[str, ...]:
    """Sources that are none of the loss's."""
    return ("momentum", "decay") if step.optimizer == "adamw" else ("decay",)


def _cotangents(
    batch: TokenBatch, before: TokenStatistics, loss: LossSettings, edges: Sequence[Number], names: Sequence[str]
) -> dict[str, Float[Tensor, " K"]]:
    """∂loss/∂log π of each token by source; 0 where the source is none of the loss's."""
    weights, keep = batch_weights(before.logprob, batch, loss, num_tokens=batch.num_tokens), batch.response_mask
    intervals = old_intervals(batch, edges)[keep]
    policy, kl = -weights.policy[keep] / batch.num_tokens, -weights.kl[keep] / batch.num_tokens
    own = {name: policy * (intervals == int(name)) for name in names if name.isdigit()} | {"kl": kl}
    return {name: own.get(name, torch.zeros_like(kl)) for name in names}


@dataclass(frozen=True)
class _Sources:
    """The sources of a step, and how their gradients become their parts of Δθ."""

    jacobian: TokenJacobian
    cotangents: dict[str, Float[Tensor, " K"]]
    """By source, see `_cotangents`."""
    step: StepSettings
    moments: Moments | None
    known: Float[Tensor, "A P"] | None
    """Gradients of the first sources, where the others have none."""

    def changes(
        self,
    ) -> tuple[Float[np.ndarray, "C K"], Float[np.ndarray, " K"], Float[Tensor, " C"], Derivative, float, float]:
        """What each source does to each token, what a unit of each token's ∂loss/∂log π and each source do to the mean
        entropy, how that was found, the clip factor, and the norm of Δθ.

        With h the gradient of the mean entropy, a source's part is ⟨h, its part of Δθ⟩. That of a token, whose gradient
        c·∇ log π becomes S(c·∇ log π) in Δθ, is c·⟨S(h), ∇ log π⟩: S multiplies entry by entry.
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
        """The gradient of the kept tokens' mean entropy, of what the optimizer holds."""
        J = self.jacobian
        slope = J.vjp(torch.full((1, J.num_tokens), 1 / J.num_tokens, dtype=torch.float64), of="entropy")
        self._keep_held(slope)
        return slope

    def _keep_held(self, parts: Vectors) -> None:
        """Set to 0 what the optimizer does not hold."""
        for name, part in parts.slices.items():
            if not self.holds(name):
                parts.rows[:, part] = 0.0

    def holds(self, name: str) -> bool:
        """Whether the optimizer holds this parameter."""
        return self.moments is None or name in self.moments.second.exp_avg_sq

    def _shape(
        self,
        rows: Float[Tensor, "C p"],
        names: list[str],
        whole: Float[Tensor, " p"],
        clip_factor: float,
        crossed: list[tuple[str, slice, slice]],
    ) -> None:
        """Turn the gradients of these sources into their parts of Δθ, in place, in a span that crosses parameters.

        whole: the gradient of all sources there, before clipping.
        """
        step, moments, parameters = self.step, self.moments, dict(float_parameters(self.jacobian.model))
        rows.mul_(clip_factor)
        clipped = None if moments is None else whole * clip_factor
        for name, place, own in crossed:
            if not self.holds(name):
                continue
            if moments is not None:
                self._precondition(rows[:, place], names, name, own, clipped[place])
            if "decay" in names:
                weights = parameters[name].detach().flatten()[own].to(rows)
                rows[names.index("decay"), place] = step.weight_decay * weights
        rows.mul_(-step.learning_rate)

    def _precondition(
        self, rows: Float[Tensor, "C p"], names: list[str], name: str, own: slice, clipped: Float[Tensor, " p"]
    ) -> None:
        """(1 − β₁)/(1 − β₁ⁿ) · G ⊘ D in each row, β₁/(1 − β₁ⁿ) · m ⊘ D in momentum's; D is the whole gradient's."""
        moments, beta = self.moments, self.step.betas[0]
        inverse = moments.second.scale_part(name, clipped, 1.0, own)
        correction = 1 - beta ** (moments.second.step[name] + 1)
        rows.mul_(inverse)
        rows *= (1 - beta) / correction
        if "momentum" in names and name in moments.first:
            m = moments.first[name].flatten()[own].to(inverse)
            rows[names.index("momentum")] = beta / correction * m * inverse


def _keys(batch: TokenBatch, before: TokenStatistics, loss: LossSettings, edges: Sequence[Number]) -> pd.DataFrame:
    """The columns of `movement_table` that tell tokens apart: those of an update that moves nothing."""
    table = movement_table([Movement("all", batch, before, before, [], 0.0, loss)], edges=edges)
    return table.drop(columns=[name for name in table if name.startswith("delta_")])


def _sources(contributions: pd.DataFrame) -> list[str]:
    """Names of the sources, in the order of the columns."""
    sources = [name.removeprefix(BY) for name in contributions if name.startswith(BY)]
    if not sources or not {"predicted", "interval", "advantage"} <= set(contributions):
        raise InputError("the table holds no contributions; give Influence.contributions")
    return sources


def _target_statistics(
    parts: Float[np.ndarray, "n A"],
    clusters: Int[np.ndarray, " n"],
    num_clusters: int,
    seed: Seed,
    confidence: float,
    resamples: int,
) -> Float[np.ndarray, "A 3 3"]:
    """For each source: mean |c|, mean c and Cov(c, Δ)/Var(Δ), each with its value and its bounds."""
    n, size = parts.shape
    if not n:
        return np.full((size, 3, 3), np.nan)
    means = parts.mean(0)
    centred = parts - means  # before they are squared: a variance is a small difference of large means
    total = centred.sum(1, keepdims=True)
    columns = np.hstack([np.ones((n, 1)), np.abs(parts), centred, centred * total, total, total**2])
    sums = np.stack([np.bincount(clusters, column, minlength=num_clusters) for column in columns.T], axis=1)

    def evaluate(weights: np.ndarray) -> np.ndarray:
        drawn = weights @ sums
        with np.errstate(invalid="ignore"):  # 0/0 where no token of the target was drawn
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
