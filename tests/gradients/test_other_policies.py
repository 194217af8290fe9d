"""log π of the same tokens under another policy: a reference's, a teacher's; and losses that need it."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from support.cli import complaint, outcome_of
from support.policies import make_batch, make_policy, save_checkpoint, write_jsonl
from support.refusals import refused
from support.words import make_tokenizer

from gradscope import load_policy
from gradscope.gradients import with_logprobs_of
from gradscope.objective import LossSettings, batch_weights, settle_loss
from gradscope.rollouts import read_dump

PAIRS = [
    {"prompt": f"w4 w{5 + n} ", "chosen": f"w{6 + n} w7 w{8 + n}", "rejected": f"w{9 + n} w{10 + n}"} for n in range(3)
]
FLOAT32 = 2e-6
"""Some roundings of sums of up to ten log-probabilities of size 5."""


@pytest.mark.parametrize("column", ["ref_logprobs", "teacher_logprobs"])
def test_they_are_the_other_policys_at_each_responses_temperature(column):
    policy, other = make_policy("qwen2"), make_policy("qwen2", seed=1)
    batch = make_batch(policy).at_temperature(0.7)
    found = getattr(with_logprobs_of(other, batch, column, policy=policy), column)
    assert torch.equal(found.isnan(), ~batch.response_mask)
    with torch.no_grad():
        for row in range(len(batch)):
            ids, kept = batch.sequence(row)
            known = (other.model(ids[None]).logits[0].double() / 0.7).log_softmax(-1)
            wanted = [float(known[place - 1, ids[place]]) for place in kept.tolist()]
            np.testing.assert_allclose(found[row][batch.response_mask[row]].numpy(), wanted, rtol=1e-5, atol=1e-5)


def test_a_policy_of_other_tokens_is_refused():
    policy, batch = make_policy("qwen2", tokenizer=True), make_batch(make_policy("qwen2"))
    other = make_policy("qwen2", seed=1, tokenizer=True)
    with_logprobs_of(other, batch, policy=policy)
    object.__setattr__(other, "tokenizer", make_tokenizer(others=("yes", "no")))
    with refused("vocabulary"):
        with_logprobs_of(other, batch, policy=policy)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    return [save_checkpoint(folder / name, "qwen2", seed=seed) for seed, name in enumerate(("policy", "reference"))]


def test_a_preference_dataset_is_weighed_with_the_reference_that_a_flag_names(checkpoints, tmp_path, capsys):
    rows, out = write_jsonl(tmp_path / "pairs.jsonl", PAIRS), tmp_path / "out"
    asked = ("measure", checkpoints[0], rows, "--out", out, "--no-figures", "--no-self-check")
    lacking = outcome_of(capsys, *asked)
    assert lacking.status == 2 and "--reference" in lacking.err and "simpo" in lacking.err
    assert outcome_of(capsys, *asked, "--reference", checkpoints[1]).status == 0
    table = pd.read_parquet(out / "tokens.parquet")
    policy, reference = map(load_policy, checkpoints)
    batch = read_dump(rows, policy).batch
    sums = {}
    for row in range(len(batch)):
        ids, kept = batch.sequence(row)
        with torch.no_grad():
            own, theirs = (p.model(ids[None]).logits[0].double().log_softmax(-1) for p in (policy, reference))
        sums[row] = sum(float(own[s - 1, ids[s]] - theirs[s - 1, ids[s]]) for s in kept.tolist())
    for row, weights in table.groupby("response")["weight"]:
        margin = sums[row - row % 2] - sums[row + 1 - row % 2]
        slope = 0.1 / (1 + np.exp(0.1 * margin)) * (1 if row % 2 == 0 else -1)
        # The mean over three pairs, in units of the mean over tokens.
        np.testing.assert_allclose(weights, slope * len(table) / 3, rtol=FLOAT32)
    assert json.loads((out / "manifest.json").read_text())["reference"] == str(checkpoints[1])
    again = outcome_of(capsys, *asked, "--reference", checkpoints[1])
    assert again.status == 0
    assert outcome_of(capsys, *asked, "--reference", checkpoints[0]).status == 2  # another reference, the same folder
    free = outcome_of(capsys, *asked[:4], tmp_path / "simpo", *asked[5:], "--weighting", "simpo")
    assert free.status == 0


@pytest.mark.parametrize(("name", "column"), [("dpo", "ref_logprobs"), ("kto:z0=0", "ref_logprobs")])
def test_a_loss_without_its_reference_names_the_remedy(name, column, checkpoints):
    batch = read_dump(write_jsonl(checkpoints[0].parent / "pairs.jsonl", PAIRS), load_policy(checkpoints[0])).batch
    said = complaint(settle_loss, batch, LossSettings(weighting=name))
    assert column in said and "--reference" in said


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs"])
@pytest.mark.parametrize("policy_gradient", [0, 1])
def test_estimators_that_say_nothing_of_the_teacher_or_praise_no_token_are_doubted(estimator, policy_gradient):
    """The truth, of a teacher that gives half of the tokens more: which weights depend on it, and have both signs."""
    batch = make_batch(make_policy("qwen2"))
    loss = LossSettings(weighting=f"opd:estimator={estimator},policy_gradient={policy_gradient}")
    kept, weights = batch.response_mask, {}
    own = torch.linspace(-2, -0.5, kept.numel()).view(kept.shape)
    for size in (0.3, -0.6):
        apart = torch.where(torch.arange(kept.numel()).view(kept.shape) % 2 == 0, size, -size)
        teacher = (own + apart).clamp(max=0)
        known = settle_loss(with_teacher(batch, teacher), loss)
        weights[size] = batch_weights(own, known, loss, num_tokens=1).policy[kept]
    is_taught = not torch.equal(*weights.values())
    praises = bool((weights[0.3] > 0).any())
    doubted = [note for note in known.notes if note.kind == "doubtful-loss"]
    assert bool(doubted) == (not (is_taught and praises))
    assert settle_loss(known, loss).notes == known.notes


def with_teacher(batch, teacher):
    return replace(batch, teacher_logprobs=teacher, old_logprobs=None)
