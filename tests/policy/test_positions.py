"""The context that a scaled rotary embedding reaches, and norms of tokens beyond the length before scaling."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.cli import complaint
from support.policies import make_batch, save_checkpoint
from support.tiers import every

from gradscope.gradients import interval_gradients, measure
from gradscope.policy import Policy, load_policy
from gradscope.rollouts import TokenBatch, read_rollouts

PLACES = 32
FACTORS = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}

SCALED = {
    "none": (PLACES, {}, PLACES),
    "linear": (PLACES, {"rope_type": "linear", "factor": 4.0}, 128),
    "dynamic": (PLACES, {"rope_type": "dynamic", "factor": 4.0}, 128),
    "yarn, no original length": (PLACES, {"rope_type": "yarn", "factor": 4.0}, 128),
    "yarn, Qwen2.5": (PLACES, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 128),
    "yarn, Qwen3": (40, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 128),
    "yarn, DeepSeek": (128, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 128),
    "yarn, not whole": (PLACES, {"rope_type": "yarn", "factor": 2.5, "original_max_position_embeddings": 32}, 80),
    "llama3": (64, {"rope_type": "llama3", "factor": 8.0} | LLAMA3, 64),
    "longrope": (64, {"rope_type": "longrope", "original_max_position_embeddings": 32} | FACTORS, 64),
}
"""max_position_embeddings, the scaling, and the context that it makes."""


def scale(folder: Path, places: int, rope: dict[str, Any], *, form: str = "rope_scaling") -> Path:
    """The checkpoint's configuration as its author writes a scaling: the older form, its older key, or the newer."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    theta = (config.pop("rope_parameters", None) or {}).get("rope_theta", 10000.0)
    config |= {"max_position_embeddings": places}
    if form == "rope_parameters":
        config |= {form: {"rope_type": "default"} | rope | {"rope_theta": theta}}
    else:
        rope = dict(rope)
        if form == "type" and rope:
            rope["type"] = rope.pop("rope_type")
        config |= {"rope_theta": theta, "rope_scaling": rope or None}
    path.write_text(json.dumps(config))
    return folder


@pytest.fixture
def folder(tmp_path) -> Path:
    return save_checkpoint(tmp_path / "model", "qwen3")


@pytest.mark.filterwarnings("ignore:.rope_parameters.")
@pytest.mark.parametrize("form", every(3, ["rope_parameters", "rope_scaling", "type"]))
@pytest.mark.parametrize("case", SCALED)
def test_the_context_is_what_the_scaling_reaches(case, form, folder):
    places, rope, context = SCALED[case]
    assert load_policy(scale(folder, places, rope, form=form)).context == context


def test_the_context_of_gemma_3_which_scales_some_layers_alone_is_as_it_says(tmp_path):
    folder = save_checkpoint(tmp_path / "model", "gemma3")
    config = json.loads((folder / "config.json").read_text())
    full = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    ropes = {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    (folder / "config.json").write_text(json.dumps(config | {"rope_parameters": ropes}))
    policy = load_policy(folder, dtype="float64")
    assert policy.context == config["max_position_embeddings"]
    assert policy.config.rope_parameters["full_attention"]["factor"] == 8.0
    batch = make_batch(policy, lengths=(3, 2), prompt_lengths=(50, 20), holes=False)
    found = measure(policy, batch)["param_grad_norm"].to_numpy(np.float64)
    np.testing.assert_allclose(found, brute_force(policy, batch), rtol=3e-5)


def brute_force(policy: Policy, batch: TokenBatch) -> list[float]:
    """‖∇ log π‖ of each token over all parameters: one autograd call each, through transformers alone."""
    parameters, norms = list(policy.model.parameters()), []
    for parameter in parameters:
        parameter.requires_grad_(True)
    for row in range(len(batch)):
        ids, targets = batch.sequence(row)
        logprobs = policy.model(input_ids=ids[None]).logits[0].log_softmax(-1)
        for k in targets.tolist():
            gradients = torch.autograd.grad(logprobs[k - 1, ids[k]], parameters, retain_graph=True)
            norms.append(sum(g.square().sum() for g in gradients).sqrt().item())
    return norms


SCALED |= {"longrope, one set of factors": (64, SCALED["longrope"][1] | {"short_factor": [2.0] * 4}, 64)}


@pytest.mark.parametrize(
    "case", every(3, ["linear", "yarn, Qwen2.5", "yarn, DeepSeek", "llama3", "longrope, one set of factors"])
)
def test_norms_beyond_the_length_before_scaling_are_those_of_plain_autograd(case, folder):
    places, rope, _ = SCALED[case]
    policy = load_policy(scale(folder, places, rope), dtype="float64")
    batch = make_batch(policy, lengths=(4, 3), prompt_lengths=(56, 20), holes=False)
    found = measure(policy, batch)["param_grad_norm"].to_numpy(np.float64)
    np.testing.assert_allclose(found, brute_force(policy, batch), rtol=3e-5)  # angles and norms are float32 inside


@pytest.mark.parametrize("case", ["dynamic", "longrope"])
def test_where_an_angle_depends_on_the_length_longer_sequences_are_refused(case, folder, tmp_path):
    places, rope, _ = SCALED[case]
    policy = load_policy(scale(folder, places, rope), dtype="float64")
    ids = torch.arange(4, 4 + 40)[None]
    with torch.no_grad():  # the library's own: a prefix alone is not what it is within the whole
        whole, alone = (policy.model(input_ids=ids[:, :length]).logits[0, :8] for length in (40, 20))
    assert (whole - alone).abs().max() > 1e-3 * alone.abs().max()
    longer = make_batch(policy, lengths=(8, 3), prompt_lengths=(25, 20), holes=False)
    for refused in (complaint(measure, policy, longer), complaint(interval_gradients, policy, longer)):
        assert "longer than 32, beyond which" in refused
    (tmp_path / "long.jsonl").write_text(json.dumps({"prompt_ids": [5] * 25, "response_ids": [6] * 8}) + "\n")
    assert "longer than 32, beyond which" in complaint(read_rollouts, tmp_path / "long.jsonl", policy)
    batch = make_batch(policy, lengths=(7, 3), prompt_lengths=(25, 20), holes=False)
    found = measure(policy, batch)["param_grad_norm"].to_numpy(np.float64)
    np.testing.assert_allclose(found, brute_force(policy, batch), rtol=3e-5)


def test_rollouts_up_to_the_scaled_context_are_read_and_longer_ones_are_not(folder, tmp_path):
    policy = load_policy(scale(folder, *SCALED["yarn, Qwen2.5"][:2]))
    rows = [{"prompt_ids": [5] * 60, "response_ids": [6] * length} for length in (68, 69)]
    (tmp_path / "short.jsonl").write_text(json.dumps(rows[0]) + "\n")
    assert read_rollouts(tmp_path / "short.jsonl", policy).input_ids.shape == (1, 128)
    (tmp_path / "long.jsonl").write_text(json.dumps(rows[1]) + "\n")
    assert "128" in complaint(read_rollouts, tmp_path / "long.jsonl", policy)
