"""Chosen and rejected responses, against a dense Jacobian and loops over pairs."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.gradients import dense_jacobian
from support.policies import make_policy, make_responses

from gradscope.diagnosis import diagnose
from gradscope.diagnosis.parts.preferences import shared_prefix
from gradscope.objective import LossSettings
from gradscope.rollouts import collate
from gradscope.updates import StepSettings

RATE, BETA, PAIRS = 1e-3, 0.3, 8


@pytest.fixture(scope="module")
def policy():
    return make_policy("qwen2", sharpness=3.0)


@pytest.fixture(scope="module")
def batch(policy):
    """Eight pairs; both sides of each begin with the same two tokens."""
    responses = make_responses(policy, lengths=(5, 7) * PAIRS, prompt_lengths=(4,) * (2 * PAIRS), holes=False)
    made = []
    for i, own in enumerate(responses):
        first = responses[i - i % 2]
        ids = [*first.response_ids[:2], *own.response_ids[2:]]
        known = {"response_ids": ids, "prompt_ids": first.prompt_ids, "group": i // 2, "temperature": 1.0}
        unknown = dict.fromkeys(("advantage", "reward", "old_logprobs", "response_mask", "sampler_logprobs"))
        ref = np.random.default_rng(i).uniform(-3, -1, len(ids)).tolist()
        made.append(replace(own, **known, **unknown, ref_logprobs=ref, pair=i // 2, chosen=float(i % 2 == 0)))
    return collate(made)


@pytest.fixture(scope="module")
def found(policy, batch):
    step = StepSettings("sgd", RATE, 0.0, max_grad_norm=None)
    loss = LossSettings(weighting=f"dpo:beta={BETA}")
    return diagnose(policy, batch, loss=loss, step=step, compare=False, actual_step=False)


def test_each_sides_change_is_what_its_gradients_do_to_first_order(policy, batch, found):
    """Δ log π(y) = −lr Σ_t ⟨g_t, ∇L⟩, with ∇L made of each side's tokens; J and log π from autograd, in float64."""
    J = dense_jacobian(policy, batch).double()
    responses = batch.response_mask.nonzero()[:, 0]
    logprob = torch.tensor(found.table["logprob"].to_numpy(float)) - batch.ref_logprobs[batch.response_mask].double()
    sums = torch.zeros(2 * PAIRS, dtype=torch.float64).index_add(0, responses, logprob)
    pull = BETA * torch.sigmoid(-BETA * (sums[0::2] - sums[1::2])) / PAIRS
    gradient = {side: torch.zeros(J.shape[1], dtype=torch.float64) for side in (0, 1)}
    for row, response in zip(J, responses.tolist(), strict=True):
        side = response % 2
        gradient[side] -= row * pull[response // 2] * (1 if side == 0 else -1)
    for side, name in enumerate(("chosen", "rejected")):
        own = J[responses % 2 == side]
        parts = {source: -RATE * float((own @ gradient[place]).sum()) / PAIRS
                 for place, source in enumerate(("chosen", "rejected"))}  # fmt: skip
        size = sum(map(abs, parts.values()))
        for source, expected in parts.items():
            row = found.pick(f"{name}_change_by_{source}", "none")
            assert row["value"] == pytest.approx(expected, abs=2e-4 * size) and row["n"] == PAIRS
            assert row["lower"] < expected < row["upper"]
        assert found.pick(f"{name}_change", "none")["value"] == pytest.approx(sum(parts.values()), abs=2e-4 * size)


def test_a_shared_beginning_has_energy_and_no_part_in_the_sum(found):
    energy, gradient = found.pick("prefix_energy", "none"), found.pick("prefix_gradient", "none")
    assert energy["n"] == 4 * PAIRS and energy["value"] > 0.05 and abs(gradient["value"]) < 1e-5


def test_the_page_says_nothing_of_rewards_or_advantages_and_the_sign_is_the_weights(found, tmp_path):
    html = found.report().to_html(tmp_path / "page.html").read_text(encoding="utf-8")
    shown = re.sub(r"<(script|style).*?</\1>", "", html, flags=re.S)
    text = re.sub(r"<[^>]*>", " ", shown.replace('<option value="reward">reward</option>', ""))
    said = " ".join([text, *(f"{f.statement} {f.detail} {f.next}" for f in found.findings), *found.notes])
    assert not re.findall(r"[^.]*\b(?:reward|advantage|GRPO|on-policy)\w*[^.]*", said) and "Â" not in said
    assert "Chosen and rejected responses" in text and "w &gt; 0" in text
    table = found.table
    np.testing.assert_array_equal(np.sign(table["advantage"]), np.where(table["chosen"] > 0, 1.0, -1.0))


def test_a_shared_prefix_ends_with_the_first_difference(found):
    table = found.table.assign(token_id=[*range(len(found.table))])
    for pair, own in table.groupby("pair"):
        for _, side in own.groupby("response"):
            table.loc[side.index[: int(pair) % 4], "token_id"] = -1 - np.arange(int(pair) % 4)
            table.loc[side.index[4:], "token_id"] = -9  # equal again, too late
    shared = shared_prefix(table)
    counts = table.assign(shared=shared).groupby("pair")["shared"].sum()
    assert counts.tolist() == [2 * (pair % 4) for pair in range(PAIRS)]
