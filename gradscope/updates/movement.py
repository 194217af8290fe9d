"""The effect of updates on every token, as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from gradscope.errors import InputError, checked
from gradscope.intervals import EDGES
from gradscope.objective import (
    PAPER,
    LossSettings,
    StepResult,
    TokenStatistics,
    batch_weights,
    fill_unknown,
    settle_advantages,
)
from gradscope.rollouts import TokenBatch
from gradscope.runs import counted
from gradscope.updates.directions import log_odds_change
from gradscope.updates.make_update import old_intervals

Number = int | float


@dataclass(frozen=True, repr=False, eq=False)
class Movement:
    """The effect of one update on every response token."""

    name: str
    """The update's name."""
    batch: TokenBatch
    """The batch, with the advantages used and π_old."""
    before: TokenStatistics
    """Statistics of the kept tokens [B, S] before the first step."""
    after: TokenStatistics
    """The same after the last step."""
    results: list[StepResult]
    """One result per step; "empty" and "nonfinite" ones were not taken."""
    update_norm: float
    """L2 norm of θ_after − θ_before over all parameters."""
    settings: LossSettings = PAPER
    """Loss settings before the update's changes."""
    displacement: Float[Tensor, " P"] | None = None
    """θ_after − θ_before, flat in the order of `float_parameters`, if requested."""

    def __repr__(self) -> str:
        steps = ", ".join(f"{r.name}: {r.outcome}, {counted(r.num_tokens, 'token')}" for r in self.results)
        return f"Movement({self.name}, ‖Δθ‖ = {self.update_norm:.3g}; {steps})"


@checked
def movement_table(movements: Sequence[Movement], *, edges: Sequence[Number] = EDGES) -> pd.DataFrame:
    """Return a row per kept response token with each update's effect; joins the token table on response and position.

    Columns: `response`, `position`, `token_id`, `group`, `advantage`; `prob`, `log_one_minus_prob` and `entropy` before
    the update, `old_prob`; `interval` of π_old; `weight`, the policy part of Eq. 2's w_t with the settings before an
    update's changes (that of "all"). For each movement NAME, after minus before: `delta_prob.NAME`,
    `delta_logprob.NAME` (nats), `delta_log_odds.NAME` (of log π − log(1−π), nats), which moves even where π rounds to
    1, and `delta_entropy.NAME` (nats). No change is computed by subtracting probabilities. Raises InputError for
    movements of different batches or policies, or with equal names.
    """
    _check_movements(movements)
    first = movements[0]
    keep, columns = first.batch.response_mask, {}
    for movement in movements:
        columns |= {f"{name}.{movement.name}": values[keep] for name, values in _changes(movement).items()}
    keys = token_keys(first.batch, first.before, first.settings, edges)
    return keys.assign(**{name: values.numpy() for name, values in columns.items()})


def token_keys(batch: TokenBatch, before: TokenStatistics, loss: LossSettings, edges: Sequence[Number]) -> pd.DataFrame:
    """Return the columns of `movement_table` from `response` to `weight`, for a batch as `resolve` returns it."""
    keep, known = batch.response_mask, {"num_tokens": batch.num_tokens, "entropy": before.entropy}
    weights = batch_weights(before.logprob, batch, loss, **known)
    columns = {
        "response": keep.nonzero()[:, 0].int(),
        "position": batch.positions()[keep].int(),
        "token_id": batch.input_ids[keep].int(),
        "group": batch.group_ids[keep.nonzero()[:, 0]],
        "advantage": batch.advantages[keep],
        "prob": before.logprob[keep].exp(),
        "old_prob": batch.old_logprobs[keep].exp().clamp(max=1.0),
        "log_one_minus_prob": before.log_one_minus_prob[keep],
        "entropy": before.entropy[keep],
        "interval": old_intervals(batch, edges)[keep].short(),
        "weight": weights.policy[keep],
    }
    return pd.DataFrame({name: values.numpy() for name, values in columns.items()})


def _changes(movement: Movement) -> dict[str, Float[Tensor, "B S"]]:
    """Return the changes of π, log π and the log odds, without subtracting two probabilities near 1."""
    before, after = movement.before, movement.after
    rise = torch.where(after.logprob == before.logprob, 0.0, after.logprob - before.logprob)  # −∞ − (−∞) = 0
    # log π keeps its digits near 0, and so does π·(e^rise − 1), unlike π' − π.
    change = before.logprob.exp() * torch.expm1(rise)
    # 0 · ∞: an impossible token became possible.
    change = torch.where(change.isnan(), after.logprob.exp() - before.logprob.exp(), change)
    moved = {"delta_prob": change, "delta_logprob": rise, "delta_log_odds": log_odds_change(before, after).to(rise)}
    return moved | {"delta_entropy": after.entropy - before.entropy}


def resolve(batch: TokenBatch, before: TokenStatistics, loss: LossSettings) -> TokenBatch:
    """Return the batch with advantages and, if unknown, the policy's own log-probabilities as π_old."""
    old = fill_unknown(batch.old_logprobs, before.logprob)
    advantages = settle_advantages(batch, before.logprob, loss, entropy=before.entropy)
    return replace(batch, advantages=advantages, old_logprobs=old)


def _check_movements(movements: Sequence[Movement]) -> None:
    """Raise InputError unless the movements belong in one table."""
    if not movements:
        raise InputError("no movement to tabulate; give at least one")
    names = [movement.name for movement in movements]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise InputError(f"two movements are called {twice[0]}; their columns would be one; name their Updates apart")
    first = movements[0]
    for other in movements[1:]:
        pairs = [(m.batch.input_ids, m.batch.response_mask, m.before.logprob) for m in (first, other)]
        same = all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(*pairs, strict=True))
        if not same or first.settings != other.settings:
            raise InputError(
                f"{first.name} and {other.name} differ in batch, policy or settings; a table compares updates of the "
                "same tokens from the same weights"
            )
