"""How many tokens each setting of a grid moves the right way, predicted and by a real update, prompt by prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from gradscope.intervals import EDGES
from gradscope.objective import PAPER, LossSettings, Pass, resolve_advantages
from gradscope.policy import Policy
from gradscope.rollouts import TokenBatch
from gradscope.runs import Progress, settle_progress, track
from gradscope.updates.directions import SIGNS, log_odds_change, right_direction_shares
from gradscope.updates.movement import Movement, apply_update
from gradscope.updates.step import SGD, StepSettings
from gradscope.updates.tuning.linear import Linearisation, Setting, linearise, trained_rows
from gradscope.updates.variants import make_variant, old_intervals, weighting_variant

NUM_INTERVALS = len(EDGES) - 1
SHARES = [f"gradient_share.{a}" for a in range(NUM_INTERVALS)]


def tune_batch(
    policy: Policy,
    batch: TokenBatch,
    grid: Sequence[Setting],
    *,
    loss: LossSettings = PAPER,
    step: StepSettings = SGD,
    optimizer_state: dict[str, Any] | None = None,
    actual: bool = True,
    memory: int | None = None,
    progress: bool | Progress = False,
) -> pd.DataFrame:
    """Predict each setting's step on one batch, with `actual` also take and rewind it, and count right directions.

    A row per setting (its place in the grid), prompt (0, 1, …), interval of π_old and sign of Â, in this order.
    Columns: setting, prompt, interval, sign; num_tokens; predicted_tied, tokens that do not move, and predicted_right,
    those that move the right way; actual_tied, actual_right (NaN without `actual`); and, the same in all rows of a
    setting, steps, adds_up, cosine, gradient_share.0, … (see `tuning.Prediction`) and method. Errors are those of
    `linearise`. memory: bytes for vectors as long as the parameters; see there and in `apply_update`.
    """
    progress = settle_progress(progress)
    numbers = {"loss": loss, "step": step, "optimizer_state": optimizer_state, "memory": memory}
    weightings = [setting.weighting for setting in grid if setting.weighting is not None]
    etas = [setting.eta for setting in grid]
    linear = linearise(policy, batch, etas=etas, weightings=weightings, progress=progress, **numbers)
    tokens, before, frames = _tokens(linear.judged, linear.batch.group_ids), None, []
    for place, setting in enumerate(track(grid, "predicting", progress, unit="settings")):
        prediction = linear.predict(setting)
        counts = _count(tokens, prediction.delta_logprob)
        counts = counts.rename(columns={"tied": "predicted_tied", "right": "predicted_right"})
        counts["actual_tied"] = counts["actual_right"] = np.nan
        if actual:
            movement = take_step(policy, linear, setting, before=before, **numbers)
            before = movement.before
            moved = log_odds_change(before, movement.after)[linear.judged.response_mask].numpy()
            counts[["actual_tied", "actual_right"]] = _count(tokens, moved)[["tied", "right"]].astype(float)
        shares = dict(zip(SHARES, prediction.gradient_shares, strict=True))
        counts = counts.assign(steps=prediction.num_steps, adds_up=prediction.adds_up, cosine=prediction.cosine)
        counts = counts.assign(**shares, method=linear.method)
        counts.insert(0, "setting", place)
        frames.append(counts)
    return pd.concat(frames, ignore_index=True)


def take_step(
    policy: Policy, linear: Linearisation, setting: Setting, *, loss: LossSettings = PAPER, **keywords: Any
) -> Movement:
    """The setting's real step on the linearised batch, rewound: what it does to the tokens of `linear.judged`.

    loss: that of the linearisation. keywords: of `apply_update`.
    """
    if setting.weighting is not None:  # whose thresholds go by all tokens, also those without an advantage
        variant = weighting_variant(setting.weighting, linear.batch, loss=loss)
        return apply_update(policy, linear.judged, variant, loss=loss, **keywords)
    choices = {name: value for name in ("alpha", "eta") if (value := getattr(setting, name)) is not None}
    variant = make_variant(setting.variant, linear.batch, loss=loss, **choices)
    # What has no gradient costs no pass; the loss's denominator stays the whole batch's.
    rows = trained_rows(linear.batch, loss)
    passes = [_only(part, rows) for part in variant.passes]
    return apply_update(policy, linear.judged, replace(variant, passes=passes), loss=loss, **keywords)


def _only(part: Pass, rows: Int[Tensor, " b"]) -> Pass:
    """The pass on these responses; as it is where they have no token of it, for a step on no gradient is a step."""
    batch = part.batch.select(rows)
    return replace(part, batch=batch) if batch.num_tokens else part


def count_tokens(batch: TokenBatch) -> Int[np.ndarray, "A 2"]:
    """Tokens of each interval of π_old with a positive and with a negative advantage; old_logprobs must be known."""
    counts = _count(_tokens(batch, batch.group_ids), np.ones(batch.num_tokens))
    return counts["num_tokens"].to_numpy().reshape(-1, NUM_INTERVALS, len(SIGNS)).sum(0)


@dataclass(frozen=True)
class _Tokens:
    """What counting needs of the kept tokens."""

    table: pd.DataFrame
    """A row per token: group, advantage, and the cell that it is counted in, prompt by interval."""
    num_prompts: int


def _tokens(batch: TokenBatch, group_ids: Int[Tensor, " n"]) -> _Tokens:
    """group_ids: of all prompts, also those without a token here."""
    keep, groups = batch.response_mask, group_ids.unique()
    group = batch.group_ids[keep.nonzero()[:, 0]]
    cell = torch.searchsorted(groups, group) * NUM_INTERVALS + old_intervals(batch)[keep]
    advantage = resolve_advantages(batch)[keep]
    return _Tokens(pd.DataFrame({"group": group, "advantage": advantage, "cell": cell}), len(groups))


def _count(tokens: _Tokens, change: Float[np.ndarray, " K"]) -> pd.DataFrame:
    """prompt, interval, sign, num_tokens, tied, right: a row for each, also where no token is."""
    table = tokens.table.assign(**{"delta_log_odds.all": change})
    counts = right_direction_shares(table, by="cell", values=range(tokens.num_prompts * NUM_INTERVALS), seed=None)
    prompt, interval = divmod(counts["cell"], NUM_INTERVALS)
    right = (counts["share"] * (counts["num_tokens"] - counts["tied"])).fillna(0).round().astype(int)
    columns = {"prompt": prompt, "interval": interval, "sign": counts["sign"]}
    return pd.DataFrame(columns | {"num_tokens": counts["num_tokens"], "tied": counts["tied"], "right": right})
