"""Shares by kind of token and position, against loops over tokens."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from support.planted import plant_table, sample_some

from gradscope.diagnosis.parts.where import shares_by


@pytest.mark.usefixtures("few_prompts_are_many")
def test_shares_by_kind_and_position_are_those_of_a_loop_over_measured_tokens():
    table = sample_some(plant_table(), 25)
    where = shares_by(table, classes=3, special={"</s>"}, seed=np.random.default_rng(0))
    kinds = {" knight": "word", "12": "digit", ",": "punctuation", "\n": "space", "</s>": "special"}
    counts, squares = dict.fromkeys(kinds.values(), 0), dict.fromkeys(kinds.values(), 0.0)
    proxies = (table["weight"] * table["logit_grad_norm"]) ** 2
    tokens = proxies.groupby(table["interval"]).sum()
    measured = proxies[table["param_grad_norm"].notna()].groupby(table["interval"]).sum()
    for row in table.itertuples():
        counts[kinds[row.token]] += 1
        if not math.isnan(row.param_grad_norm):
            each = tokens[row.interval] / measured[row.interval]
            squares[kinds[row.token]] += each * (row.weight * row.param_grad_norm) ** 2
    rows = where[where["driver"] == "token_class"].set_index("value")
    for kind in counts:
        assert rows.loc[kind, "token_share"] == pytest.approx(counts[kind] / len(table))
        assert rows.loc[kind, "squared_share"] == pytest.approx(squares[kind] / sum(squares.values()))
        assert rows.loc[kind, "squared_lower"] < rows.loc[kind, "squared_share"] < rows.loc[kind, "squared_upper"]
    own = table.assign(kind=table["token"].map(kinds), size=0.0)
    known = own["param_grad_norm"].notna()
    each = tokens[own["interval"]].to_numpy() / measured[own["interval"]].to_numpy()
    own["size"] = (each * (own["weight"] * own["param_grad_norm"]) ** 2).where(known, 0.0)
    sums = own.groupby(["group", "kind"])["size"].agg(["size", "sum"]).unstack(fill_value=0)
    prompts, rng = len(sums), np.random.default_rng(0)
    for name, prefix in (("size", "token"), ("sum", "squared")):
        draws = rng.multinomial(prompts, np.full(prompts, 1 / prompts), size=1000)
        redrawn = draws @ sums[name].to_numpy()
        shares = pd.DataFrame(redrawn / redrawn.sum(1, keepdims=True), columns=sums[name].columns)
        for end, tail in (("lower", 0.05 / 10), ("upper", 1 - 0.05 / 10)):  # 5 % for all five kinds, both sides
            assert rows[f"{prefix}_{end}"].to_dict() == pytest.approx(shares.quantile(tail).to_dict())
    positions = where[where["driver"] == "position_class"]
    assert len(positions) == 3 and positions["token_share"].sum() == pytest.approx(1)
    assert set(where["driver"]) == {"token_class", "position_class", "length_class", "entropy_class", "advantage_sign"}
