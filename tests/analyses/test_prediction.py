"""Branches off a run, the first-order gain they are predicted by, and the record that `compare` prints of it."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from analyses.common import branches
from analyses.common.experiments import configure, list_runs
from analyses.measure.predictions import flatten, gain_by_prompt
from analyses.paper import prediction
from gradscope import load_policy
from gradscope.sampling import batch_rows, rollout_rows
from gradscope.tasks import get_task
from gradscope.trainer import OPTIMIZER

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "figures/controls/data"
TINY = {"questions_per_step": 1, "group_size": 4, "mini_batch_size": 4, "max_new_tokens": 60, "save_rollouts": True}


@pytest.fixture
def origin(tmp_path, monkeypatch):
    """The checkpoint after two steps of a tiny run."""
    monkeypatch.setattr(branches, "WORK", tmp_path)
    monkeypatch.setattr(branches, "STEPS", (0, 2))

    def make(*place):
        return replace(configure(*place), **TINY, people=(2,), steps=2, save_every=2)

    monkeypatch.setattr(branches, "configure", make)
    monkeypatch.setattr(branches, "list_runs", lambda scale: [r for r in list_runs(scale) if r.seed == 30])
    found = branches.Origin("cpu", 30, 2)
    branches.train(replace(make("cpu", "origins", "grpo"), seed=30), found.run, progress=False)
    return found


def test_a_branch_goes_on_from_weights_and_moments_and_methods_meet_the_same_responses(origin):
    ends = {variant: branches.take_branch(origin, variant, 1, 1) for variant in ("grpo", "reweight")}
    other = branches.take_branch(origin, "grpo", 2, 1)
    sampled = [pd.read_parquet(end.parents[1] / "rollouts" / "step-000003.parquet") for end in (*ends.values(), other)]
    assert sampled[0]["response"].tolist() == sampled[1]["response"].tolist() != sampled[2]["response"].tolist()
    assert sampled[0]["prompt"].tolist() == sampled[1]["prompt"].tolist() != sampled[2]["prompt"].tolist()
    start = flatten(load_policy(origin.folder).model)
    for end in ends.values():
        assert end.name == "step-000003"
        steps = {int(state["step"]) for state in torch.load(end / OPTIMIZER, weights_only=True)["state"].values()}
        assert steps == {3}
        assert 0 < (flatten(load_policy(end).model) - start).abs().max() < 1e-3
    assert branches.take_branch(origin, "grpo", 1, 1) == ends["grpo"]  # not made again
    assert [found.step for found in branches.list_origins("cpu") if found.seed == 30] == [0, 2]
    assert origin.weights != branches.Origin("cpu", 30, 0).weights


def test_the_gain_is_that_of_finite_differences_of_the_log_probability_of_each_response():
    policy, task = load_policy("embedded", dtype="float64", device="cpu"), get_task("knights-knaves-compact")
    settings = {"n": 3, "temperature": 0.7, "max_new_tokens": 120, "seed": 1}
    batch = batch_rows(rollout_rows(policy, task.questions(3, seed=1, people=(2,)), task=task, **settings))
    torch.manual_seed(0)
    direction = 1e-3 * torch.randn(2, len(flatten(policy.model)), dtype=torch.float64)
    found = gain_by_prompt(policy, batch, direction)
    for place in range(2):
        sides = []
        for sign in (1, -1):
            moved, begin = load_policy("embedded", dtype="float64", device="cpu"), 0
            for parameter in moved.model.parameters():
                part = direction[place, begin : begin + parameter.numel()].view_as(parameter)
                parameter.data += sign * 1e-2 * part
                begin += parameter.numel()
            sides.append([log_probability(moved, batch, row) for row in range(len(batch))])
        slopes = (np.array(sides[0]) - np.array(sides[1])) / 2e-2
        for prompt in range(3):
            rows = range(3 * prompt, 3 * prompt + 3)
            rewards = [float(batch.rewards[row]) for row in rows]
            terms = [
                slopes[row] * (rewards[i] - (sum(rewards) - rewards[i]) / 2) for i, row in enumerate(rows)
            ]  # minus the mean of the two others
            assert found[place, prompt] == pytest.approx(sum(terms) / 3, rel=1e-2, abs=1e-5)  # float32 norms within
    assert np.abs(found).max() > 0


def log_probability(policy, batch, row):
    ids, kept = batch.sequence(row)
    with torch.no_grad():
        logits = policy.model(ids[None]).logits[0] / 0.7
    return float(logits.log_softmax(-1)[kept - 1].gather(1, ids[kept][:, None]).sum())


def test_the_record_of_the_gain_in_the_docs_is_that_of_the_kept_branches():
    found = prediction.table()
    kept = pd.read_csv(KEPT / "prediction_scores.csv").set_index("score")
    again = prediction.score(found).set_index("score")
    pd.testing.assert_frame_equal(kept.drop("right signs, by steps alone"), again, rtol=1e-6)
    signs, correlation, alone = (kept.loc[name] for name in ("right signs", "correlation", kept.index[-1]))

    def told(row: pd.Series) -> str:
        return "{:.2f} [{:.2f}, {:.2f}]".format(*row[["value", "lower", "upper"]]).replace("0.", ".")

    words = " ".join((ROOT / "docs/comparing.md").read_text(encoding="utf-8").split())
    assert f"in {signs['value'] * 40:.0f} of 40 cases (share {told(signs)}" in words
    without = prediction.without_each(found)
    pd.testing.assert_frame_equal(pd.read_csv(KEPT / "prediction_without.csv"), without, rtol=1e-6)
    fails = without.loc[without["lower"] < 0, prediction.ORIGIN].apply(tuple, axis=1).tolist()
    assert fails == [("cpu", 30, 0), ("certain", 30, 0), ("certain", 30, 40)]  # the page names them
    left_out = "leaving out any one of three of the checkpoints takes its lower bound below 0"
    assert f"correlation {told(correlation)}; {left_out}" in words
    assert f"right in {alone['value'] * 40:.0f} of 40" in words
    assert prediction.predicts(again.reset_index()) and kept.loc[again.index[2:], "lower"].min() < 0.5
