"""`gradscope audit --after`: two checkpoints of a loop of torch's AdamW on gradscope's own loss, sound or at fault."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
import pytest
import torch
from support import cli
from support.policies import make_policy, make_responses, save_checkpoint, write_jsonl

from gradscope.objective import LossSettings, batch_loss, loss_logprobs, resolve_advantages
from gradscope.policy import load_policy
from gradscope.rollouts import read_rollouts


def train(folder, *, decayed: bool) -> None:
    """Three steps, each with a checkpoint; norms and biases have no decay, unless `decayed`."""
    responses = make_responses(make_policy("qwen2"), lengths=(6, 8) * 4, prompt_lengths=(4,) * 8, holes=False)
    keep = ("prompt_ids", "response_ids", "group", "reward")
    file = write_jsonl(folder / "rows.jsonl", [{name: getattr(own, name) for name in keep} for own in responses])
    save_checkpoint(folder / "checkpoint-0", "qwen2")
    policy = load_policy(folder / "checkpoint-0")
    batch = read_rollouts(file, policy)
    batch = replace(batch, advantages=resolve_advantages(batch)).left_aligned()[0]
    parts: dict[bool, list] = {True: [], False: []}
    for parameter in policy.model.parameters():
        parts[decayed or parameter.dim() > 1].append(parameter)
    groups = [{"params": own, "weight_decay": 0.1 * has} for has, own in parts.items() if own]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    for step in (1, 2):
        optimizer.zero_grad()
        loss = LossSettings(kl_coef=0.0)
        batch_loss(loss_logprobs(policy.model, batch), batch, loss, num_tokens=batch.num_tokens).backward()
        optimizer.step()
        save_checkpoint(folder / f"checkpoint-{step}", "qwen2")
        policy.model.save_pretrained(folder / f"checkpoint-{step}")
        torch.save(optimizer.state_dict(), folder / f"checkpoint-{step}/optimizer.pt")


@pytest.mark.parametrize("decayed", [False, True])
def test_a_step_between_checkpoints_is_checked_with_the_gradient_that_its_moments_tell(tmp_path, capsys, decayed):
    """Biases of keys have next to no gradient, whose rounding AdamW enlarges: no alarm of it."""
    train(tmp_path, decayed=decayed)
    places = (tmp_path / "checkpoint-1", tmp_path / "rows.jsonl", "--after", tmp_path / "checkpoint-2")
    cli.run("audit", *places, "--kl-coef", "0", "--out", tmp_path / "out")
    said, verdict = capsys.readouterr().out, (tmp_path / "out/verdict.txt").read_text(encoding="utf-8")
    assert ("decays norms or biases in biases, norms" in said) == decayed
    assert ("The step is AdamW's of this gradient" in verdict) == (not decayed)
    step = pd.read_csv(tmp_path / "out/step.csv").set_index("group")
    assert (step["learning_rate"] - 1e-3).abs().max() < 1e-6
    expected = [0.0 if group in ("biases", "norms") and not decayed else 0.1 for group in step.index]
    assert (step["weight_decay"] - expected).abs().max() < 1e-3
