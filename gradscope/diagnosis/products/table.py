"""The token table, and samples of it at other temperatures where the rollouts' is unknown."""

from __future__ import annotations

import pandas as pd

from gradscope.diagnosis.measured import Measured
from gradscope.diagnosis.settings import DiagnosisSettings
from gradscope.gradients import (
    Following,
    MeasureSettings,
    Resources,
    Stopwatch,
    fill_table,
    prepare_measurement,
)
from gradscope.policy import AdamWState, Policy
from gradscope.rollouts import Note, TokenBatch
from gradscope.runs import Progress

TITLE = "other temperatures"
STAGE = "other temperatures"
TRIED = (0.6, 0.7, 1.0)
"""Usual sampling temperatures."""
EACH = 100
"""Tokens measured per interval at each temperature."""


def measure_table(
    policy: Policy,
    batch: TokenBatch,
    settings: DiagnosisSettings,
    *,
    metric: AdamWState | None,
    progress: Progress,
    watch: Stopwatch,
    following: Following = Following(),  # noqa: B008  (frozen)
) -> tuple[pd.DataFrame, tuple[Note, ...], float | None]:
    """Measure the token table within the settings' minutes; return it, its notes, and the minutes of a verdict."""
    each = settings.tokens_per_interval if settings.minutes is None else None
    sample = {"tokens_per_interval": each, "minutes": settings.minutes, "seed": settings.seed}
    sample = MeasureSettings(**sample, loss=settings.loss, module_groups=True, metric=metric and "adamw")
    known = {"optimizer_state": metric, "resources": Resources(settings.gradient_memory, progress=progress)}
    measurement = prepare_measurement(
        policy, batch, sample, edges=settings.edges, watch=watch, following=following, **known
    )
    return fill_table(measurement), measurement.notes, measurement.verdict_minutes


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
