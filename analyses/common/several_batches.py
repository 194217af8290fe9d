"""Summed gradients of several batches: means over them, and standard deviations (n − 1) in columns `norm_sd`, …."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pandas as pd
import torch

from gradscope.gradients import Resources, interval_gradients
from gradscope.objective import PAPER, LossSettings
from gradscope.policy import Policy
from gradscope.rollouts import TokenBatch


def mean_gradients(
    policy: Policy,
    batches: Iterable[TokenBatch],
    *,
    loss: LossSettings = PAPER,
    resources: Resources | None = None,
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the table and the cosines of `interval_gradients`, averaged over the batches.

    Means and deviations are over the batches where the number is defined; `batches` counts those with tokens in
    the interval, num_tokens adds up, and signal_to_noise is mean signal over mean noise.
    """
    settings = {"loss": loss, "resources": resources, "generator": torch.Generator().manual_seed(0)}
    results = [interval_gradients(policy, batch, **settings) for batch in batches]
    cosines = np.ma.masked_invalid(np.stack([result.cosines for result in results])).mean(0).filled(np.nan)
    return _mean_table([result.table for result in results]), pd.DataFrame(cosines)


def _mean_table(tables: list[pd.DataFrame]) -> pd.DataFrame:
    names = tables[0][["interval", "label"]]
    numbers = {c: pd.concat([t[c] for t in tables], axis=1) for c in tables[0].columns.drop(["interval", "label"])}
    out = names.assign(batches=numbers["norm"].count(axis=1), num_tokens=numbers.pop("num_tokens").sum(axis=1))
    del numbers["signal_to_noise"]
    for column, values in numbers.items():
        out[column], out[f"{column}_sd"] = values.mean(axis=1), values.std(axis=1)
    return out.assign(signal_to_noise=out["signal"] / out["noise"])
