"""One real optimizer step with the whole batch, measured and undone."""

from __future__ import annotations

import pandas as pd

from gradscope.diagnosis.measured import Case, Measured
from gradscope.updates import OptimizerStep, movement_table, update_cost

TITLE = "the actual step"
STAGE = "one real step"


def asked(m: Measured) -> bool:
    return m.settings.actual_step


def passes(case: Case) -> float:
    return update_cost() if case.settings.actual_step else 0.0


def cost(m: Measured) -> float:
    return m.seconds(passes(m.case))


def make(m: Measured) -> pd.DataFrame | None:
    """Return `updates.movement_table` of the step, columns ending in .all."""
    if not m.processes.is_main:
        return None
    moved = OptimizerStep(m.jacobian.alone().moved(), **m.step_keywords()).take()
    return movement_table([moved], edges=m.settings.edges)
