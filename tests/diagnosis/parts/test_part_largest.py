"""The largest tokens and their share of the squares."""

from __future__ import annotations

import pytest
from support.planted import plant_table, sample_some

from gradscope.diagnosis.parts.largest import largest_tokens


def test_the_largest_tokens_come_with_their_share_of_the_squares():
    table = sample_some(plant_table(), 30)
    norms = sorted(
        abs(r.weight) * r.param_grad_norm for r in table.itertuples() if r.param_grad_norm == r.param_grad_norm
    )
    top = largest_tokens(table, 5)
    assert top["weighted_norm"].tolist() == pytest.approx(norms[:-6:-1])
    assert top["squared_share"].tolist() == pytest.approx([n**2 / sum(m**2 for m in norms) for n in norms[:-6:-1]])
    one = table[(table["response"] == top["response"][0]) & (table["position"] == top["position"][0])].iloc[0]
    assert (top["token"][0], top["prob"][0]) == (one["token"], one["prob"])
