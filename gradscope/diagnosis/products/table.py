"""The token table, and samples of it at other temperatures where the rollouts' is unknown."""

from __future__ import annotations

import pandas as pd

from gradscope.diagnosis.measured import Measured
from gradscope.gradients import (
    MeasureSettings,
    fill_table,
    prepare_measurement,
)

TITLE = "other temperatures"
STAGE = "other temperatures"
TRIED = (0.6, 0.7, 1.0)
"""Usual sampling temperatures."""
EACH = 100
"""Tokens measured per interval at each temperature."""


def asked(m: Measured) -> bool:
    """Whether a note says that the temperature is unknown."""
    return m.weighted and any(note.kind == "temperature" for note in m.notes)


def cost(m: Measured) -> float:
    """A measured token takes about three forward passes of its response."""
    return m.seconds(len(TRIED) * (1 + 3 * EACH * len(m.labels) / int(m.batch.response_mask.any(1).sum())))


def make(m: Measured) -> dict[float, pd.DataFrame] | None:
    """Return the table by temperature: as given at the assumed one, a sample of `EACH` per interval at others."""
    if not m.processes.is_main:
        return None
    sample = MeasureSettings(
        tokens_per_interval=EACH, seed=m.settings.seed, loss=m.settings.loss, self_check=False
    )
    tables = {}
    for temperature in TRIED:
        tables[temperature] = m.table
        if (m.batch.temperature != temperature).any():
            other = m.batch.at_temperature(temperature)
            tables[temperature] = fill_table(prepare_measurement(m.policy, other, sample, edges=m.settings.edges))
    return tables
