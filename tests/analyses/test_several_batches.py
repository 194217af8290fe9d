"""Means over several batches, number by number."""

import math

import pytest
import torch
from support.groups import NARROW
from support.policies import make_batch, make_policy

from analyses.common.several_batches import mean_gradients
from gradscope.gradients import interval_gradients

NUMBERS = ["norm", "share", "cosine_with_all", "half_cosine", "signal", "noise"]


def test_several_batches_give_the_mean_and_standard_deviation_of_each_number():
    policy = make_policy("qwen2", torch.float64)
    batch = make_batch(policy, temperature=0.7)
    batches = [batch, make_batch(policy, seed=1), make_batch(policy, seed=2).select([0, 1])]
    generator = torch.Generator().manual_seed(0)
    single = [interval_gradients(policy, b, loss=NARROW, generator=generator) for b in batches]
    table, cosines = mean_gradients(policy, iter(batches), loss=NARROW)
    for a in range(5):
        for column in NUMBERS:
            values = [v for v in (r.table[column][a] for r in single) if not math.isnan(v)]
            mean = sum(values) / len(values) if values else math.nan
            assert table[column][a] == pytest.approx(mean, rel=1e-9, nan_ok=True)
            assert len(values) > 1 or math.isnan(table[f"{column}_sd"][a])
            if len(values) > 1:
                sd = math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1))
                assert table[f"{column}_sd"][a] == pytest.approx(sd, rel=1e-9)
        assert table["batches"][a] == sum(r.table["num_tokens"][a] > 0 for r in single)
        assert table["num_tokens"][a] == sum(r.table["num_tokens"][a] for r in single)
        assert table["signal_to_noise"][a] == table["signal"][a] / table["noise"][a]
    values = [v for v in (r.cosines.loc[0, 3] for r in single) if not math.isnan(v)]
    assert len(values) == 2
    assert cosines.loc[0, 3] == pytest.approx(sum(values) / 2, rel=1e-9)
