"""Mean norms by layer."""

from __future__ import annotations

import numpy as np
import pytest
from support.planted import plant_table

from gradscope.diagnosis.parts.layers import layer_norms
from gradscope.intervals import EDGES


def test_layer_norms_are_means_over_each_places_tokens():
    table = plant_table()
    layers = layer_norms(table, EDGES, seed=np.random.default_rng(0))
    assert layers["quantity"].unique().tolist() == [
        "logit_grad_norm", "act_grad_norm.0", "act_grad_norm.1", "param_grad_norm",
    ]  # fmt: skip
    for row in layers.itertuples():
        expected = table.loc[table["interval"] == row.interval, row.quantity].mean()
        assert row.value == pytest.approx(expected)
        assert row.lower < expected < row.upper
