"""The math runs of a scale: sums at scale cpu; the paper's two sets of training problems at scale paper."""

from __future__ import annotations

import pandas as pd

from analyses.common.experiments import RUNS

TRAINED_ON = {"math": "sums", "math-dsr": "DSR-Uniform", "math-orz": "ORZ"}
"""Track → its training questions."""
BEFORE = "untrained.csv"
"""Of a track's folder: the table of the policy before training, on the test of the track's runs."""


def read_before(scale: str, track: str) -> pd.DataFrame | None:
    """`evaluate`'s table of the policy before training, a row per level, with the step 0; None if it was not judged."""
    file = RUNS / scale / track / BEFORE
    return pd.read_csv(file, dtype={"level": str}) if file.is_file() else None
