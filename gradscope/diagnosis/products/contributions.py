"""What every token holds of the summed gradient: of its own prompt's part, and of what the other prompts want."""

from __future__ import annotations

import pandas as pd
import torch

from gradscope.diagnosis.measured import Case, Measured
from gradscope.gradients import Contributions

TITLE = "every token's share of the summed gradient"
STAGE = "tokens' shares"
FOLDS = 8
"""Folds of prompts, for bounds of any grouping; fewer prompts are folds by themselves."""
PASSES = 9.0 + 3 * (FOLDS - 1)
"""Forward passes over the batch, at most."""

COLUMNS = ("gradient_share", "own_share", "signal")
"""Columns of the token table."""


def asked(m: Measured) -> bool:
    return True


def passes(case: Case) -> float:
    return PASSES


def cost(m: Measured) -> float:
    return m.seconds(PASSES)


def make(m: Measured) -> Contributions:
    """Compute c_t, o_t and s_t of every token under the loss's weights, with folds of prompts if there are three."""
    prompts, weights = len(m.jacobian.prompts), torch.tensor(m.table["weight"].to_numpy())
    folds = min(FOLDS, prompts) if prompts >= 3 else None
    generator = torch.Generator().manual_seed(m.settings.seed)
    return m.jacobian.contributions(weights, folds=folds, generator=generator)


def add_columns(table: pd.DataFrame, found: Contributions | None) -> pd.DataFrame:
    """Add gradient_share, own_share and signal, float32: c_t, o_t/‖G‖² and s_t; unchanged if they are unknown."""
    if found is None or not found.square_norm > 0:
        return table
    return table.assign(**{name: getattr(found, name).float().numpy() for name in COLUMNS})
