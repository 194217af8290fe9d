"""What every token holds of the summed gradient: of its own prompt's part, and of what the other prompts want."""

from __future__ import annotations

from math import inf

import pandas as pd
import torch

from gradscope.diagnosis.measured import Case, Measured
from gradscope.gradients import Contributions

TITLE = "every token's share of the summed gradient"
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
    return PASSES


def cost(m: Measured) -> float:
    return m.seconds(PASSES)


def make(m: Measured) -> Contributions:
    """Compute c_t, o_t and s_t of every token under the loss's weights, with the folds of prompts that fit."""
    prompts, weights = len(m.jacobian.prompts), torch.tensor(m.table["weight"].to_numpy())
    generator = torch.Generator().manual_seed(m.settings.seed)
    folds = min(FOLDS, prompts, _fitting_folds(m))
    return m.jacobian.contributions(weights, folds=folds if folds >= FEWEST_FOLDS else None, generator=generator)


def _fitting_folds(m: Measured) -> int:
    """Return how many folds fit into half of the time that is left beside the shares themselves, on every process."""
    spare = (m.clock.left - m.seconds(PASSES)) / 2
    mine = FOLDS if spare == inf else 1 + int(spare / m.seconds(EACH_FOLD))
    return m.processes.gather([mine])[0]


def add_columns(table: pd.DataFrame, found: Contributions | None) -> pd.DataFrame:
    """Add gradient_share, own_share and signal, float32: c_t, o_t/‖G‖² and s_t; unchanged if they are unknown."""
    if found is None or not found.square_norm > 0:
        return table
    return table.assign(**{name: getattr(found, name).float().numpy() for name in COLUMNS})
