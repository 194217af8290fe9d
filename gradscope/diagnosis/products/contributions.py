"""What every token holds of the summed gradient: of its own prompt's part, and of what the other prompts want."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pandas as pd
import torch

from gradscope.diagnosis.measured import Case, Measured
from gradscope.gradients import Contributions
from gradscope.policy import AdamWState

TITLE = "every token's share of the summed gradient"
ADAMW_TITLE = "the same in AdamW's metric"
STAGE = "tokens' shares"
FOLDS, FEWEST_FOLDS = 8, 3
"""Folds of prompts, for bounds of any grouping, as many as the time allows; fewer prompts are folds by themselves."""
PASSES, EACH_FOLD = 9.0, 3.0
"""Forward passes over the batch, at most: in all, and for each fold but one."""
COLUMNS = ("gradient_share", "own_share", "signal")
"""Columns of the token table."""


def asked(m: Measured) -> bool:
    return True


def passes(case: Case) -> float:
    return PASSES * (1 + case.metric)


def cost(m: Measured) -> float:
    """The price of the responses with a weight; the others have no part in the gradient."""
    return m.seconds(PASSES) * _live(m)


def make(m: Measured) -> Contributions:
    """Compute c_t, o_t and s_t of every token under the loss's weights, with the folds of prompts that fit.

    In AdamW's metric, too, if its state is known: with v as saved, without this batch's square, so that tokens of
    different prompts stay independent.
    """
    found = _contribute(m)
    if m.metric is None or not m.fits("adamw_shares", ADAMW_TITLE, cost(m)):
        return found
    return replace(found, scaled=_contribute(m, m.metric))


def _contribute(m: Measured, scale: AdamWState | None = None) -> Contributions:
    prompts, weights = len(m.jacobian.prompts), torch.tensor(m.table["weight"].to_numpy())
    folds = min(FOLDS, prompts, _fitting_folds(m))
    known = {"folds": folds if folds >= FEWEST_FOLDS else None, "scale": scale}
    return m.jacobian.contributions(weights, **known, generator=torch.Generator().manual_seed(m.settings.seed))


def _fitting_folds(m: Measured) -> int:
    """Return how many folds fit into half of the time that is left beside the shares themselves, on every process."""
    spare = (m.clock.left - cost(m)) / 2
    mine = FOLDS if spare == inf else 1 + int(spare / (m.seconds(EACH_FOLD) * _live(m)))
    return m.processes.gather([mine])[0]


def _live(m: Measured) -> float:
    """Return the share of the batch's positions that are in responses with a weight."""
    lengths = m.batch.attention_mask.sum(1)
    weights = m.table["weight"].abs().groupby(m.table["response"]).sum()
    live = torch.tensor(weights.index[weights > 0].to_numpy())
    return float(lengths[live].sum() / lengths[m.batch.response_mask.any(1)].sum())


def add_columns(table: pd.DataFrame, found: Contributions | None) -> pd.DataFrame:
    """Add c_t, o_t/‖G‖² and s_t as COLUMNS, float32, and with _adamw in AdamW's metric; unchanged if unknown."""
    for metric, own in (("", found), ("_adamw", found and found.scaled)):
        if own is not None and own.square_norm > 0:
            table = table.assign(**{f"{name}{metric}": getattr(own, name).float().numpy() for name in COLUMNS})
    return table


def drop_columns(table: pd.DataFrame) -> pd.DataFrame:
    """Drop what `add_columns` adds, which belongs to one loss and its prompts."""
    return table.drop(columns=[f"{name}{metric}" for name in COLUMNS for metric in ("", "_adamw")], errors="ignore")
