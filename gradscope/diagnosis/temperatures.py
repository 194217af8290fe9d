"""Recompute the headline at other sampling temperatures than the one assumed."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from gradscope.diagnosis.format import name_interval, share_words
from gradscope.diagnosis.result import DiagnosisSettings, pick_row
from gradscope.diagnosis.tokens import sum_by_prompt, token_shares
from gradscope.gradients import MeasureSettings, TableMeasurement, fill_table
from gradscope.intervals import interval_labels
from gradscope.policy import Policy
from gradscope.resampling import Seed
from gradscope.rollouts import TokenBatch

Number = int | float
TRIED = (0.6, 0.7, 1.0)
"""Usual sampling temperatures."""
EACH = 100
"""Tokens measured per interval at each temperature."""


def try_temperatures(
    policy: Policy,
    batch: TokenBatch,
    table: pd.DataFrame,
    settings: DiagnosisSettings,
    *,
    seed: Seed = 0,
    temperatures: Sequence[Number] = TRIED,
) -> pd.DataFrame:
    """Compute the lowest interval's share of tokens and of energy at several temperatures, a row each.

    table: of the batch at the assumed temperature, which is not measured again; at other temperatures, a sample of
    `EACH` tokens per interval is measured, and bounds include its error. Columns: temperature; token_share and
    squared_share with _lower and _upper, as in `token_shares`.
    """
    labels, rows = interval_labels(settings.edges), []
    sample = MeasureSettings(tokens_per_interval=EACH, seed=settings.seed, loss=settings.loss, self_check=False)
    for temperature in temperatures:
        own = table
        if (batch.temperature != temperature).any():
            other = batch.at_temperature(temperature)
            with TableMeasurement(policy, other, sample, edges=settings.edges) as measurement:
                own = fill_table(measurement)
        shares = token_shares(sum_by_prompt(own, len(labels)), labels, seed=seed, resamples=settings.resamples)
        row: dict[str, float] = {"temperature": float(temperature)}
        for name, metric in (("token_share", "none"), ("squared_share", "raw")):
            known = pick_row(shares, name, metric, labels[0])
            row |= {name: known["value"], f"{name}_lower": known["lower"], f"{name}_upper": known["upper"]}
        rows.append(row)
    return pd.DataFrame(rows)


def temperature_cost(batch: TokenBatch, intervals: int) -> float:
    """Return the cost in forward passes over the batch: a measured token takes about three of its response's."""
    return len(TRIED) * (1 + 3 * EACH * intervals / int(batch.response_mask.any(1).sum()))


def temperature_words(tried: pd.DataFrame, label: str) -> str:
    """Describe the headline at each temperature."""
    columns = {"squared_share": "value", "squared_share_lower": "lower", "squared_share_upper": "upper"}
    shares = tried[list(columns)].rename(columns=columns)
    pairs = zip(shares.iterrows(), tried["temperature"], strict=True)
    each = [f"{share_words(row)} at T = {temperature:g}" for (_, row), temperature in pairs]
    listed = f"{', '.join(each[:-1])} and {each[-1]}"
    return f"Tokens with {name_interval(label)} account for {listed} of the gradient energy."
