"""Measure whether probability or entropy goes with the size of a token's gradient, at every place in the network.

Log norms of a policy in training (24 × 8 responses, every token) are regressed on log(1−π) and entropy jointly, on
tokens with 1−π > 1e-3; coefficients are standardised, intervals resample prompts. Writes

    fits.csv            both coefficients at every place, with intervals
    by_value.csv        mean norms and shares by token class, position, entropy and sign of the advantage
    tokens.parquet      the token table
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from analyses.common.in_training import FRESH, moments
from analyses.common.measurements import keep
from gradscope.gradients import measure as measure_tokens
from gradscope.theory import add_drivers, regress_norms

BY = ("token_class", "position_class", "entropy_class", "advantage_sign")


def measure(out: Path, *, scale: str = "cpu", run: Path | None = None, questions: int = 24) -> None:
    """Measure every token of a batch, fit, and keep the tables."""
    [moment] = moments(scale, run=run, last=1)
    tokens = measure_tokens(moment.policy, moment.sample(questions, seed=FRESH))
    special = set(moment.policy.tokenizer.all_special_tokens)
    tables = {
        "fits.csv": regress_norms(tokens, seed=np.random.default_rng(0)),
        "by_value.csv": by_driver(add_drivers(tokens, special=special)),
        "tokens.parquet": tokens,
    }
    keep(out, tables, step=moment.step, questions=questions, responses=8, tokens=len(tokens))


def by_driver(tokens: pd.DataFrame) -> pd.DataFrame:
    """Return mean norm (unweighted), and shares of the tokens and of Σ‖w·g‖, for each value of each driver."""
    size = tokens["weight"].abs() * tokens["param_grad_norm"]
    rows = []
    for driver in BY:
        for value, own in tokens.groupby(driver, observed=True):
            row = {"driver": driver, "value": value, "tokens": len(own), "share_of_tokens": len(own) / len(tokens)}
            row |= {"mean_norm": own["param_grad_norm"].mean(), "mean_prob": own["prob"].mean()}
            rows.append(row | {"share_of_weighted_norms": size[own.index].sum() / size.sum()})
    return pd.DataFrame(rows)
