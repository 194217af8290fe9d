"""The margins of Prop. 4.2."""

from __future__ import annotations

import math

import pytest
from support.planted import plant_table

from gradscope.diagnosis.parts.theory import bound_margins


def test_the_margins_of_the_bounds_are_the_smallest_distances_and_a_broken_bound_is_counted():
    table = plant_table()
    n, rest = 50, 1 - table["prob"]
    found = bound_margins(table, n)
    assert (found.num_tokens, found.violations) == (len(table), 0)
    # float32 columns: 1e-6 relative.
    assert found.lower_margin == pytest.approx(1.2 / math.sqrt(n / (n - 1)) - 1, abs=1e-5)
    assert found.upper_margin == pytest.approx(1 - 1.2 / math.sqrt(2), abs=1e-5)
    table.loc[3, "logit_grad_norm"], table.loc[7, "logit_grad_norm"] = 1.5 * rest[3], 0.9 * rest[7]
    found = bound_margins(table, n)
    assert found.violations == 2
    assert found.upper_margin == pytest.approx(1 - 1.5 / math.sqrt(2), abs=1e-5)
    assert found.lower_margin == pytest.approx(0.9 / math.sqrt(n / (n - 1)) - 1, abs=1e-5)
