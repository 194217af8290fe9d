"""Right directions, counted."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from support.planted import LABELS

from gradscope.diagnosis.parts.directions import direction_rows
from gradscope.diagnosis.rows import pick_row


def test_right_directions_are_counted_among_the_tokens_that_moved():
    rng = np.random.default_rng(0)
    table = pd.DataFrame({"interval": rng.integers(0, 3, 400), "group": rng.integers(0, 8, 400)})
    table["advantage"] = rng.choice([-1.0, 0.0, 2.0], 400)
    table["delta_log_odds.all"] = rng.choice([-0.1, 0.0, 0.3], 400)
    rows, frame = direction_rows(table, "actual", LABELS, seed=np.random.default_rng(0))
    for sign, word in ((1, "positive"), (-1, "negative")):
        for interval, label in [*enumerate(LABELS), (None, "all")]:
            right, moved = 0, 0
            for row in table.itertuples(name=None, index=False):
                own = interval is None or row[0] == interval
                if own and np.sign(row[2]) == sign and row[3] != 0:
                    moved, right = moved + 1, right + (np.sign(row[3]) == sign)
            found = pick_row(rows, f"right_direction_{word}_actual", interval=label)
            assert found["n"] == moved
            assert found["value"] == pytest.approx(right / moved if moved else math.nan, nan_ok=True)
    assert set(frame["interval"]) == {*LABELS, "all"} and set(frame["kind"]) == {"actual"}
