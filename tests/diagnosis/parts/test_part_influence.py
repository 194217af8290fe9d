"""Influence, against covariances."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from support.planted import LABELS

from gradscope.diagnosis.parts.influence import influence_rows
from gradscope.diagnosis.rows import pick_row


def test_influence_rows_are_covariances_with_the_whole_predicted_change():
    rng = np.random.default_rng(0)
    interval = rng.integers(0, 4, 300)
    table = pd.DataFrame({"interval": interval, "group": rng.integers(0, 8, 300), "advantage": rng.normal(size=300)})
    sources = ["0", "1", "2", "3", "kl", "decay"]
    for name in sources:
        table[f"by.{name}"] = rng.normal(size=300) * (3 if name == "0" else 1)
    table["predicted"] = table[[f"by.{name}" for name in sources]].sum(axis=1)
    rows, _ = influence_rows(table, LABELS, seed=np.random.default_rng(0))
    top = table[interval == 3]
    for statistic, source in (("low_to_high_share", "0"), ("high_to_high_share", "3")):
        row = pick_row(rows, statistic, interval=LABELS[3])
        expected = np.cov(top[f"by.{source}"], top["predicted"])[0, 1] / top["predicted"].var()
        assert row["value"] == pytest.approx(expected, rel=1e-10)
        assert row["lower"] < expected < row["upper"] and row["n"] == len(top)
    # A source without a gradient causes nothing that could be told: it is not there.
    rows, _ = influence_rows(table.assign(**{"by.0": 0.0}), LABELS, seed=np.random.default_rng(0))
    assert np.isnan(pick_row(rows, "low_to_high_share", interval=LABELS[3])["value"])
    assert np.isfinite(pick_row(rows, "high_to_high_share", interval=LABELS[3])["value"])
