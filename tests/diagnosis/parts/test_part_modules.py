"""Shares of modules, against sums over tokens."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from support.policies import make_batch, make_policy

from gradscope.diagnosis.parts.modules import module_shares
from gradscope.gradients import measure


@pytest.mark.parametrize("each", [None, 3])
def test_module_shares_are_sums_over_tokens(each):
    policy = make_policy("qwen2")  # embedding and head share a table
    given = {"tokens_per_interval": each, "self_check": False}
    table = measure(policy, make_batch(policy), per_module=True, module_groups=True, **given)
    found = module_shares(table, policy).set_index("module")
    chances = table.get("sampling_probability", pd.Series(1.0, table.index)).astype(float)
    proxies = (table["weight"] * table["logit_grad_norm"]).astype(float) ** 2
    known = (proxies / chances).where(table["param_grad_norm"].notna(), 0.0)
    counts = table["interval"].map(proxies.groupby(table["interval"]).sum() / known.groupby(table["interval"]).sum())
    counts = (counts / chances).fillna(0.0)
    energy = lambda name, own: np.nansum(own * (table["weight"] * table[name].astype(float)) ** 2)  # noqa: E731
    lowest = counts * (table["interval"] == 0)
    whole = {own: energy("param_grad_norm", weights) for own, weights in (("all", counts), ("low", lowest))}
    assert found["squared_share"].sum() == pytest.approx(1) == found["parameter_share"].sum()
    leaves = {f"attention {part}": [f"{part}_proj"] for part in "qkvo"} | {"embedding and head": ["embed_tokens"]}
    leaves |= {"MLP": ["gate_proj", "up_proj", "down_proj"]}
    leaves |= {"norms": ["input_layernorm", "post_attention_layernorm", "norm"]}
    assert {*found.index} == {*leaves}
    for module, row in found.iterrows():
        single = [name for name, _ in policy.model.named_modules() if name.rpartition(".")[2] in leaves[module]]
        parts = [sum(energy(f"param_grad_norm.{name}", own) for name in single) for own in (counts, lowest)]
        assert row["squared_share"] == pytest.approx(parts[0] / whole["all"], rel=1e-5)
        assert row["low_share"] == pytest.approx(parts[1] / whole["low"], rel=1e-5)
        size = sum(p.numel() for name in single for p in policy.model.get_submodule(name).parameters(recurse=False))
        assert row["parameter_share"] == pytest.approx(size / sum(p.numel() for p in policy.model.parameters()))
    assert module_shares(table[[c for c in table if not c.startswith("param_grad_norm.")]], policy) is None
