"""The size of a token's own term in the gradient, ‖w·g‖, measured or estimated."""

from __future__ import annotations

import numpy as np
import pandas as pd
from jaxtyping import Float

from gradscope.gradients import LOGITS, PARAMETERS, sampling_probabilities, sampling_weights, stands_for


def weighted_norms(table: pd.DataFrame, norm: str = PARAMETERS) -> Float[np.ndarray, " n"]:
    """Return ‖w·g‖ of each token in float64; NaN if weight or norm is unknown. norm: the column of ‖g‖."""
    return np.abs(table["weight"].to_numpy(np.float64)) * table[norm].to_numpy(np.float64)


def scaled_squares(table: pd.DataFrame) -> Float[np.ndarray, " n"]:
    """Return ‖w·g‖² of each measured token times its factor in sums over all tokens; NaN for the others."""
    return weighted_norms(table) ** 2 * energy_factors(table)


def energy_factors(table: pd.DataFrame, weight: str = "weight") -> Float[np.ndarray, " n"]:
    """Return `stands_for` with the proxy (w·‖e − π‖)² of each token. weight: the column of w."""
    known = table[PARAMETERS].notna().to_numpy()
    if known.all():
        return np.ones(len(table))
    return stands_for(table, known, (table[weight] * table[LOGITS]).to_numpy(np.float64) ** 2)


def total_squares(table: pd.DataFrame) -> float:
    """Return Σ‖w·g‖² over all tokens (estimated, if a sample with known probabilities was drawn)."""
    sampled = sampling_probabilities(table) is not None
    return float(np.nansum(scaled_squares(table) if sampled else weighted_norms(table) ** 2))


def add_weighted_norms(table: pd.DataFrame) -> pd.DataFrame:
    """Add weighted_norm, ‖w·g‖, and squared_share, its square's percentage of `total_squares` (NaN if that is 0)."""
    norm, total = weighted_norms(table), total_squares(table)
    return table.assign(weighted_norm=norm, squared_share=100 * norm**2 / total if total > 0 else np.nan)


def add_estimated_norms(table: pd.DataFrame) -> pd.DataFrame:
    """Add weighted_norm_estimate if some tokens were measured and others not; otherwise return the table unchanged.

    This is ‖w·g‖ if known, and otherwise |w|·‖e − π‖ times the ratio of the two quantities' sums over the interval's
    measured tokens.
    """
    if not {"weighted_norm", "weight", LOGITS} <= {*table}:
        return table
    exact, cheap = table["weighted_norm"].astype(float), table["weight"].abs() * table[LOGITS].astype(float)
    known = exact.notna()
    if known.all() or not known.any():
        return table
    counts = sampling_weights(table)
    both = pd.DataFrame({"exact": counts * exact, "cheap": counts * cheap.where(known)})
    sums = both.groupby(table["interval"]).sum()
    ratio = (sums["exact"] / sums["cheap"].where(sums["cheap"] > 0)).reindex(table["interval"]).to_numpy()
    return table.assign(weighted_norm_estimate=exact.where(known, cheap * ratio))
