"""Mere wording, words that steer, and content: their groups token by token, and the table of planted numbers."""

import pandas as pd
import pytest
import torch

from analyses.common import measurements
from analyses.measure.base_policy import sample_batch
from analyses.measure.kinds import assign_groups, tabulate
from analyses.paper import kinds
from analyses.recipes.hasty_analysis import KINDS, OPENERS, TRIES, WORDING
from gradscope import load_policy
from gradscope.gradients import interval_gradients
from gradscope.intervals import interval_labels
from gradscope.objective import resolve_advantages

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
            if token in WORDING or (answering and token in ("Zoey", "Oliver", "Mia", "Jack", "Ava")):
                kind = 0
            else:
                kind = 1 if token in OPENERS or token in TRIES else 2
            group = 3 * sum(prob >= bound for bound in BOUNDS) + kind
            assert int(groups[row, column]) == group, token
            counts[group] = counts.get(group, 0) + 1
    found = tabulate(policy, batch)
    parts = found[found["kind"].isin(KINDS)]
    assert parts["num_tokens"].tolist() == [counts.get(group, 0) for group in range(12)]
    whole = interval_gradients(policy, batch).table
    [wording] = parts.loc[(parts["kind"] == "wording") & (parts["interval"] == "0"), "norm"]
    assert wording == pytest.approx(norm_of(policy, batch, groups == 0), rel=1e-3)
    # Shares ⟨G_a, G⟩/‖G‖² of the three kinds add up to their interval's.
    added = parts.groupby("interval", sort=False)["share"].sum()
    assert added.tolist() == pytest.approx(whole["share"].iloc[:4].tolist(), abs=1e-4)


def norm_of(policy, batch, chosen):
    """The gradient norm of Σ Â log π / tokens over some tokens, with GRPO's advantages, by one backward pass."""
    advantages, total = resolve_advantages(batch), 0.0
    for row in range(len(batch)):
        ids, kept = batch.sequence(row)
        logprobs = (
            (policy.model(ids[None]).logits[0] / 0.7).log_softmax(-1)[kept - 1].gather(1, ids[kept][:, None])[:, 0]
        )
        mask = batch.response_mask[row]
        total = total + (advantages[row][mask] * logprobs)[chosen[row][mask]].sum() / batch.num_tokens
    gradients = torch.autograd.grad(total, list(policy.model.parameters()))
    return float(torch.cat([gradient.flatten() for gradient in gradients]).norm())


def test_means_over_batches_and_shares_of_the_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(measurements, "RUNS", tmp_path)
    rows = []
    for batch, norm in enumerate((1.0, 3.0)):
        made = {"batch": batch, "share": 0.25, "half_cosine": 0.5}
        rows.append(made | {"kind": "all kinds", "interval": "all", "label": "all", "num_tokens": 100, "norm": 2.0})
        for kind, tokens in (("all kinds", 40), *zip(KINDS, (30, 6, 4), strict=True)):
            for number, label in enumerate(interval_labels()):
                rows.append(
                    made | {"kind": kind, "interval": number, "label": label, "num_tokens": tokens, "norm": norm}
                )
    measurements.keep(measurements.folder("kinds"), {"kinds.csv": pd.DataFrame(rows)})
    kinds.main(kinds.Options(out=tmp_path / "figures"))
    found = pd.read_csv(tmp_path / "figures" / "kinds.csv").set_index(["kind", "interval", "quantity"])
    assert found.loc[("wording", "[0, ¼)", "token_share"), "mean"] == pytest.approx(0.3)
    row = found.loc[("all kinds", "[¾, 1]", "norm_of_all")]
    assert row["mean"] == pytest.approx(1.0)  # of .5 and 1.5, whose t interval is ± 12.706 · .5
    assert row["upper"] == pytest.approx(1.0 + 12.706 * 0.5, rel=1e-4)
