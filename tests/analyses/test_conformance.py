"""The table of trainers' gradients: rows again by plain autograd, and the pairs of settings that it has."""

from __future__ import annotations

import csv
import itertools
from pathlib import Path

import pytest
import torch
from support.trl_runs import TEMPERATURE, Recorder, needs_trl, save_policy
from torch.nn.functional import logsigmoid

from analyses.docs.conformance import trl_distillation, trl_grpo, trl_texts
from analyses.docs.conformance.row import judge

pytestmark = needs_trl

TABLE = Path(__file__).parents[2] / "figures/verdicts/data/conformance.csv"
KEYS = ("ids", "mask")
EXACT = 1e-5
"""Relative distance of two programs' float32 gradients."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def recorders(monkeypatch):
    """Each recorder of a run, which saw the inputs of every step."""
    kept = []

    class Kept(Recorder):
        def __init__(self, trainer):
            super().__init__(trainer)
            kept.append(self)

    monkeypatch.setattr(trl_grpo, "Recorder", Kept)
    return kept


def row_of(trainer, case):
    with TABLE.open(encoding="utf-8") as file:
        (row,) = (row for row in csv.DictReader(file) if (row["trainer"], row["case"]) == (trainer, case))
    return row


def own_logprobs(model, inputs, temperature):
    """log π of each completion's tokens [C], one sequence at a time and without padding."""
    found = []
    for i in range(len(inputs["prompt_ids"])):
        prompt = inputs["prompt_ids"][i][inputs["prompt_mask"][i].bool()]
        answer = inputs["completion_ids"][i][inputs["completion_mask"][i].bool()]
        logits = model(input_ids=torch.cat([prompt, answer])[None]).logits[0, len(prompt) - 1 : -1]
        found.append((logits / temperature).log_softmax(-1).gather(-1, answer[:, None])[:, 0])
    return found


def distance(model, loss, gradient):
    """‖∇loss − gradient‖ / ‖gradient‖ over all parameters."""
    named = dict(model.named_parameters())
    own = torch.autograd.grad(loss, [named[name] for name in gradient], retain_graph=True)
    theirs = torch.cat([g.flatten() for g in gradient.values()])
    return float((torch.cat([g.flatten() for g in own]) - theirs).norm() / theirs.norm())


def test_dapo_divides_by_the_generations_tokens_over_its_steps(checkpoint, tmp_path, recorders):
    """The documentation's are those of the step's own responses."""
    case = trl_grpo.PLAIN | {"generation": 2, "gradient_accumulation_steps": 2}
    step = trl_grpo.run(case, checkpoint, tmp_path)
    tokens = [
        [int(part["completion_mask"].sum()) for part in step["window"]] for step in recorders[0].steps
    ]  # of both steps on one generation
    assert len(tokens) == 2 and sum(tokens[0]) != sum(tokens[1])
    total = 0.0
    for inputs in recorders[0].steps[-1]["window"]:
        known = zip(own_logprobs(step.policy.model, inputs, TEMPERATURE), inputs["advantages"], strict=True)
        old = inputs["old_per_token_logps"]
        for i, (logprobs, advantage) in enumerate(known):
            ratio = (logprobs - old[i, : len(logprobs)]).exp()
            total -= torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum()
    divisor = (sum(tokens[0]) + sum(tokens[1])) / 2
    assert distance(step.policy.model, total / divisor, step.gradient) < EXACT
    found = judge(step)
    assert found["agrees"] == "no" and float(found["factor"]) == pytest.approx(sum(tokens[1]) / divisor, rel=1e-3)


def test_grpo_with_kl_off_policy_is_the_mean_over_responses(checkpoint, tmp_path, recorders):
    case = trl_grpo.PLAIN | {"loss_type": "grpo", "num_iterations": 2, "beta": 0.1}
    step = trl_grpo.run(case, checkpoint, tmp_path)
    (inputs,) = recorders[0].steps[-1]["window"]
    total, clipped = 0.0, 0
    for i, logprobs in enumerate(own_logprobs(step.policy.model, inputs, TEMPERATURE)):
        old, ref = (inputs[f"{name}_per_token_logps"][i, : len(logprobs)] for name in ("old", "ref"))
        ratio, advantage = (logprobs - old).exp(), inputs["advantages"][i]
        clipped += int(((ratio > 1.2) & (advantage > 0) | (ratio < 0.8) & (advantage < 0)).sum())
        kl = (ref - logprobs).exp() - (ref - logprobs) - 1
        terms = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage) - 0.1 * ratio * kl
        total -= terms.mean()
    assert clipped
    assert distance(step.policy.model, total / len(inputs["prompt_ids"]), step.gradient) < EXACT
    found = judge(step)
    assert (found["agrees"], found["reading"], found["factor"]) == ("yes", "sequence-mean", "1")


def test_the_entropy_bonus_is_the_mean_over_micro_batches_of_means(checkpoint, tmp_path, recorders):
    """Beside a mean over the step's tokens."""
    case = trl_grpo.PLAIN | {"gradient_accumulation_steps": 2, "entropy_coef": 0.1}
    step = trl_grpo.run(case, checkpoint, tmp_path)
    window, model = recorders[0].steps[-1]["window"], step.policy.model
    counts, policy, bonus = [int(part["completion_mask"].sum()) for part in window], 0.0, []
    assert counts[0] != counts[1]
    for inputs in window:
        own = own_logprobs(model, inputs, TEMPERATURE)
        for logprobs, advantage in zip(own, inputs["advantages"], strict=True):
            policy -= ((logprobs - logprobs.detach()).exp() * advantage).sum() / sum(counts)
        ids, seen = (torch.cat([inputs[f"{side}_{name}"] for side in ("prompt", "completion")], 1) for name in KEYS)
        start = inputs["prompt_ids"].shape[1] - 1
        logits = model(input_ids=ids, attention_mask=seen).logits[:, start:-1] / TEMPERATURE
        entropies = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)
        bonus.append((entropies * inputs["completion_mask"]).sum())
    means = sum(total / count / 2 for total, count in zip(bonus, counts, strict=True))
    assert distance(model, policy - 0.1 * means, step.gradient) < EXACT
    assert distance(model, policy - 0.1 * sum(bonus) / sum(counts), step.gradient) > 100 * EXACT


def test_dpo_is_the_mean_over_pairs(checkpoint, tmp_path):
    case = next(case for case in trl_texts.CASES if case.kind == "DPOTrainer" and case.micro_batches == 2)
    step, total = trl_texts.run(case, checkpoint, tmp_path), 0.0
    batch, sides = step.batch, {}
    for i in range(len(batch)):
        ids, kept = batch.input_ids[i][batch.attention_mask[i]], batch.response_mask[i][batch.attention_mask[i]]
        logits = step.policy.model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
        own = logits.gather(-1, ids[1:, None])[:, 0][kept[1:]].sum()
        gain = own - batch.ref_logprobs[i][batch.response_mask[i]].sum()
        sides[int(batch.pair_ids[i]), bool(batch.chosen[i])] = gain
    pairs = sorted({pair for pair, _ in sides})
    for pair in pairs:
        total -= logsigmoid(0.1 * (sides[pair, True] - sides[pair, False])) / len(pairs)
    assert len(pairs) == trl_texts.SIZE
    assert distance(step.policy.model, total, step.gradient) < EXACT
    assert judge(step)["agrees"] == row_of("TRL DPOTrainer", str(case))["agrees"] == "yes"


def test_gkd_on_its_own_samples_divides_by_the_datasets_tokens(checkpoint, tmp_path):
    """As the sum over generated tokens, with both distributions and their mixture written out."""
    case = next(case for case in trl_distillation.CASES if case.settings.get("lmbda") == 1.0)
    taken, total, beta = trl_distillation.run(case, checkpoint, tmp_path), 0.0, case.settings["beta"]
    batch = taken.batch
    for i in range(len(batch)):
        ids, kept = (own[i][batch.attention_mask[i]] for own in (batch.input_ids, batch.response_mask))
        models = (taken.policy.model, taken.teacher)
        own, teacher = (model(input_ids=ids[None]).logits[0, :-1][kept[1:]].softmax(-1) for model in models)
        mixed = beta * teacher + (1 - beta) * own
        total += (beta * teacher * (teacher / mixed).log() + (1 - beta) * own * (own / mixed).log()).sum()
    counted = sum(range(1, trl_distillation.SIZE + 1))  # the answers that the dataset has
    assert batch.num_tokens != counted
    assert distance(taken.policy.model, total / counted, taken.gradient) < EXACT
    row = row_of("TRL GKDTrainer", str(case))
    assert row["agrees"] == "no" and float(row["factor"]) == pytest.approx(int(row["tokens"]) / counted, rel=1e-3)


def test_every_pair_of_levels_is_in_the_table():
    cases = trl_grpo.cases()
    assert len(cases) <= 60
    for one, other in itertools.combinations(trl_grpo.LEVELS, 2):
        for a, b in itertools.product(trl_grpo.LEVELS[one], trl_grpo.LEVELS[other]):
            if {one: a, other: b}.items() >= {("importance_sampling_level", "sequence")}:
                other_type = {one: a, other: b}.get("loss_type", "grpo")
                if other_type not in trl_grpo.OF_RESPONSES:
                    continue
            if {a, b} == {"luspo", "token"}:
                continue
            assert any(case[one] == a and case[other] == b for case in cases), (one, a, other, b)
    for case in cases:
        told, documented = trl_grpo.describe(case)
        assert row_of("TRL GRPOTrainer", told)["documented"] == documented
