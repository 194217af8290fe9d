"""A scale's math runs: sums at scale cpu, the paper's two training sets at scale paper."""

from __future__ import annotations

import pandas as pd

from analyses.common.experiments import RUNS

TRAINED_ON = {"math": "sums", "math-dsr": "DSR-Uniform", "math-orz": "ORZ"}
"""{track: its training questions}."""
BEFORE = "untrained.csv"
"""File in a track's folder: the untrained policy on the test of the track's runs."""


def read_before(scale: str, track: str) -> pd.DataFrame | None:
    """Return `evaluate`'s table of the untrained policy, a row per level, with step 0; None if it was not judged."""
    file = RUNS / scale / track / BEFORE
    return pd.read_csv(file, dtype={"level": str}) if file.is_file() else None
