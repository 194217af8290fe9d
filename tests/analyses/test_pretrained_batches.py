"""The comparison that analyses/paper/pretrained_batches.py draws, on made-up batches."""

import numpy as np
import pandas as pd
import pytest

from analyses.paper.fig1 import APART, over_batches
from analyses.paper.pretrained_batches import compare, mean_norms

NORMS = np.array([[3.0, 2.0, 1.0, 0.5, 4.0], [2.0, 2.0, 1.0, 1.0, 4.0], [1.0, 2.0, 3.0, 1.0, 5.0]])
"""Of three batches: the intervals', and that of all tokens."""
T_OF_TWO = 4.302652729911275
"""The .975 quantile of Student's t with two degrees of freedom, from a table."""


def _gradients() -> pd.DataFrame:
    names = ["0", "1", "2", "3", "all"]
    rows = [
        {"batch": batch, "interval": name, "label": name, "norm": norm, "num_tokens": 10 if name == "all" else 2.5}
        for batch, norms in enumerate(NORMS)
        for name, norm in zip(names, norms, strict=True)
    ]
    return pd.DataFrame(rows).assign(share=0.25, policy="tiny", temperature=1.0)


def test_the_interval_is_students_over_the_batches_ratios():
    found = compare(_gradients())
    row = found[(found["quantity"] == "norm_ratio")].iloc[0]
    ratios = NORMS[:, 0] / NORMS[:, 4]
    half = T_OF_TWO * np.sqrt(((ratios - ratios.mean()) ** 2).sum() / 2 / 3)
    assert row[["mean", "lower", "upper"]].tolist() == pytest.approx(
        [ratios.mean(), ratios.mean() - half, ratios.mean() + half]
    )
    assert found.loc[found["quantity"] == "token_share", "mean"].tolist() == pytest.approx([0.25] * 4)


def test_similarities_vary_over_the_batches_whose_prompts_share_a_step():
    values = {"only-0": [0.9, 0.7, 0.8], "only-3": [0.1, 0.4, -0.2]}
    rows = [
        {"update": name, "batch": batch, "num_tokens": 9, "correlation": value, "optimizer": "sgd"}
        for name, own in values.items()
        for batch, value in [*enumerate(own), ("all", 0.99)]  # what was pooled over batches is left out
    ]
    found = over_batches(pd.DataFrame(rows), ["optimizer"])
    assert len(found) == 6 + 3
    apart = np.subtract(values["only-0"], values["only-3"])
    for name, own in (values | {APART: apart}).items():
        row = found[(found["batch"] == "all") & (found["update"] == name)].iloc[0]
        mean, half = np.mean(own), T_OF_TWO * np.std(own, ddof=1) / np.sqrt(3)
        assert row[["correlation", "lower", "upper"]].tolist() == pytest.approx([mean, mean - half, mean + half])
    t = apart.mean() / apart.std(ddof=1) * np.sqrt(3)
    assert found["p"].dropna().tolist() == pytest.approx([1 - t / np.sqrt(2 + t**2)])  # two degrees of freedom


def test_panel_d_has_means_over_the_batches():
    found = mean_norms(_gradients())
    assert found["norm"].tolist() == pytest.approx(NORMS.mean(axis=0).tolist())
    assert found["norm_sd"].tolist() == pytest.approx(NORMS.std(axis=0, ddof=1).tolist())
