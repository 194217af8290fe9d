"""Tokens that bear on the answer and mere wording: their groups token by token, and the table of planted numbers."""

import pandas as pd
import pytest
import torch

from analyses.common import measurements
from analyses.measure.base_policy import sample_batch
from analyses.measure.kinds import KINDS, assign_groups, tabulate
from analyses.paper import kinds
from analyses.recipes.hasty_analysis import WORDING
from gradscope import load_policy
from gradscope.gradients import interval_gradients
from gradscope.intervals import interval_labels

BOUNDS = (0.25, 0.5, 0.75)


def test_every_token_is_counted_once_by_its_interval_and_its_kind():
    policy = load_policy("embedded", device="cpu")
    batch = sample_batch(policy, 4, 2, seed=3)
    with torch.no_grad():
        logits = policy.model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
    probs = (logits / 0.7).softmax(-1)
    groups, counts = assign_groups(policy, batch), {}
    for row in range(len(batch)):
        answering = False
        for column in batch.response_mask[row].nonzero()[:, 0].tolist():
            token = policy.decode([int(batch.input_ids[row, column])])
            answering = answering or token == "<answer> "
            prob = float(probs[row, column - 1, batch.input_ids[row, column]])
            bears = token not in WORDING and not (answering and token in ("Zoey", "Oliver", "Mia", "Jack", "Ava"))
            group = 2 * sum(prob >= bound for bound in BOUNDS) + bears
            assert int(groups[row, column]) == group, token
            counts[group] = counts.get(group, 0) + 1
    found = tabulate(policy, batch)
    parts = found[found["kind"].isin(KINDS)]
    assert parts["num_tokens"].tolist() == [counts.get(group, 0) for group in range(8)]
    whole = interval_gradients(policy, batch).table
    assert found["norm"].iloc[:5].tolist() == pytest.approx(whole["norm"].tolist())
    # Shares ⟨G_a, G⟩/‖G‖² of the two kinds add up to their interval's.
    added = parts.groupby("interval", sort=False)["share"].sum()
    assert added.tolist() == pytest.approx(whole["share"].iloc[:4].tolist(), abs=1e-4)


def test_means_over_batches_and_shares_of_the_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(measurements, "RUNS", tmp_path)
    rows = []
    for batch, norm in enumerate((1.0, 3.0)):
        made = {"batch": batch, "share": 0.25, "half_cosine": 0.5}
        rows.append(made | {"kind": "both", "interval": "all", "label": "all", "num_tokens": 100, "norm": 2.0})
        for kind, tokens in (("both", 40), *zip(KINDS, (30, 10), strict=True)):
            for number, label in enumerate(interval_labels()):
                rows.append(
                    made | {"kind": kind, "interval": number, "label": label, "num_tokens": tokens, "norm": norm}
                )
    measurements.keep(measurements.folder("kinds"), {"kinds.csv": pd.DataFrame(rows)})
    kinds.main(kinds.Options(out=tmp_path / "figures"))
    found = pd.read_csv(tmp_path / "figures" / "kinds.csv").set_index(["kind", "interval", "quantity"])
    assert found.loc[("wording", "[0, ¼)", "token_share"), "mean"] == pytest.approx(0.3)
    row = found.loc[("both", "[¾, 1]", "norm_of_all")]
    assert row["mean"] == pytest.approx(1.0)  # of .5 and 1.5, whose t interval is ± 12.706 · .5
    assert row["upper"] == pytest.approx(1.0 + 12.706 * 0.5, rel=1e-4)
