"""The intervals' shares of the summed gradient by size of batch: how it is dealt, and what is drawn of it."""

import pandas as pd
import pytest

from analyses.common import measurements
from analyses.measure.base_policy import sample_batch
from analyses.measure.batch_sizes import measure, tabulate
from analyses.paper import batch_sizes
from gradscope import load_policy
from gradscope.gradients import interval_gradients
from gradscope.intervals import interval_labels


def test_every_puzzle_is_in_one_batch_of_each_size():
    policy = load_policy("embedded", device="cpu")
    batch = sample_batch(policy, 4, 2, seed=3)
    whole = interval_gradients(policy, batch).table
    halves, same = tabulate(policy, batch, 2), tabulate(policy, batch, 4)
    assert halves.groupby("label", sort=False)["num_tokens"].sum().tolist() == whole["num_tokens"].tolist()
    assert halves["batch"].unique().tolist() == [0, 1] and (halves["size"] == 2).all()
    assert same["share"].tolist() == pytest.approx(whole["share"].tolist(), rel=1e-5, abs=1e-7)


def test_what_is_measured_can_be_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr(measurements, "RUNS", tmp_path)
    measure(measurements.folder("batch_sizes"), questions=8, responses=2, sizes=(2, 4))
    batch_sizes.main(batch_sizes.Options(out=tmp_path / "figures"))
    found = pd.read_csv(tmp_path / "figures" / "batch_sizes.csv")
    assert found.groupby("size")["batches"].unique().map(list).to_dict() == {2: [4], 4: [2]}
    parts = found[found["quantity"] == "gradient_share"].groupby("size")["mean"].sum()
    assert parts.tolist() == pytest.approx([1.0, 1.0], abs=1e-4)  # the intervals' shares add up to the whole


def test_means_over_the_batches_of_each_size(tmp_path, monkeypatch):
    monkeypatch.setattr(measurements, "RUNS", tmp_path)
    rows = []
    for size, shares in ((8, (0.2, 0.3, 0.7, 0.8)), (16, (0.5, 0.7))):
        for batch, share in enumerate(shares):
            made = {"size": size, "batch": batch, "share": share}
            rows += [made | {"label": label, "norm": 1.0 + batch} for label in interval_labels()]
            rows.append(made | {"label": "all", "norm": 4.0, "share": 1.0})
    folder = measurements.folder("batch_sizes")
    measurements.keep(folder, {"batch_sizes.csv": pd.DataFrame(rows)}, questions=32, responses=8)
    batch_sizes.main(batch_sizes.Options(out=tmp_path / "figures"))
    found = pd.read_csv(tmp_path / "figures" / "batch_sizes.csv").set_index(["size", "interval", "quantity"])
    row = found.loc[(16, "[0, ¼)", "gradient_share")]  # of .5 and .7, whose t interval is ± 12.706 · .1
    assert row[["mean", "lower", "upper"]].tolist() == pytest.approx([0.6, 0.6 - 1.2706, 0.6 + 1.2706], rel=1e-4)
    assert row["sd"] == pytest.approx(0.2 / 2**0.5, rel=1e-4)
    assert row["batches"] == 2 and found.loc[(8, "[0, ¼)", "gradient_share"), "mean"] == pytest.approx(0.5)
    assert found.loc[(8, "[¾, 1]", "norm_of_all"), "mean"] == pytest.approx((1 + 2 + 3 + 4) / 16)
