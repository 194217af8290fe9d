"""Distance from the policy that sampled, against a loop over tokens."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from support.planted import plant_table

from gradscope.diagnosis.parts.off_policy import lag_rows
from gradscope.diagnosis.rows import pick_row
from gradscope.objective import LossSettings


def test_lag_and_clipping_are_those_of_a_loop_over_tokens_whose_old_logprob_is_known():
    table, rng = plant_table(), np.random.default_rng(1)
    table["logprob"] = np.log(table["prob"])
    table["old_logprob"] = table["logprob"] + 0.5 * rng.normal(size=len(table))
    table.loc[rng.permutation(len(table))[:60], "old_logprob"] = np.nan
    loss = LossSettings(clip_ratio_low=0.2, clip_ratio_high=0.3, clip_ratio_c=1.5)
    gaps, low, high, dual = [], 0, 0, 0
    for row in table.itertuples():
        if math.isnan(row.old_logprob):
            continue
        ratio = math.exp(row.logprob - row.old_logprob)
        gaps.append(abs(row.logprob - row.old_logprob))
        low += row.advantage < 0 and ratio < 0.8
        high += row.advantage > 0 and ratio > 1.3
        dual += row.advantage < 0 and ratio > 1.5
    rows, n = lag_rows(table, loss, seed=np.random.default_rng(0)), len(gaps)
    expected = {"logprob_difference_mean": sum(gaps) / n, "logprob_difference_max": max(gaps)}
    expected |= {"clip_low": low / n, "clip_high": high / n, "clip_dual": dual / n}
    for statistic, value in expected.items():
        row = pick_row(rows, statistic)
        assert row["value"] == pytest.approx(value) and row["n"] == n
        assert row["lower"] < value < row["upper"] or statistic.endswith("max")
    off = lag_rows(table, replace(loss, clip_ratio_c=None), seed=None)
    assert pick_row(off, "clip_dual")["value"] == 0
    assert lag_rows(table.assign(old_logprob=np.nan), loss, seed=None).empty
