"""What the functions that README names give, as files: python freeze_calls.py INPUTS OUT."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pandas as pd
import torch

import gradscope
from gradscope import objective, theory


def main(inputs: Path, out: Path) -> None:
    out.mkdir(parents=True)
    policy = gradscope.load_policy(inputs / "llama")
    batch = gradscope.read_rollouts(inputs / "llama.jsonl", policy)
    table = gradscope.measure(policy, batch, per_module=True)
    table.to_parquet(out / "measure.parquet")
    summed = gradscope.interval_gradients(policy, batch)
    summed.table.astype({"interval": str}).to_parquet(out / "interval_gradients.parquet")
    summed.cosines.rename(columns=str).to_parquet(out / "cosines.parquet")
    write_json(out / "capture.json", capture(policy, batch))
    step = gradscope.StepSettings(optimizer="adamw", learning_rate=1e-3)
    movements = gradscope.apply_updates(policy, batch, ["all", "reweight", "lopti"], step=step)
    gradscope.movement_table(movements).to_parquet(out / "movements.parquet")
    rooms = hasattr(gradscope.updates, "influence")  # an older commit has it in a module of its own
    found = (gradscope.updates if rooms else gradscope.influence).influence(policy, batch)
    found.contributions.to_parquet(out / "influence.parquet")
    diagnosis = gradscope.diagnose(policy, batch, table)
    diagnosis.statistics.to_parquet(out / "diagnosis.parquet")
    write_json(out / "objective.json", call_objective())
    write_json(out / "theory.json", call_theory())


def capture(policy, batch) -> dict[str, list]:
    ids, targets = batch.sequence(2)
    with gradscope.capture_gradients(policy.model, ["model.layers.0", "model.layers.1"]) as gradients:
        logits = policy.model(input_ids=ids[None]).logits[0, targets - 1]
        torch.log_softmax(logits, -1).gather(1, ids[targets][:, None]).sum().backward()
    return {name: gradient.flatten().tolist() for name, gradient in gradients.items()}


def call_objective() -> dict[str, list]:
    generator = torch.Generator().manual_seed(0)
    old, new, ref = (-torch.rand(6, 9, generator=generator) * 3 for _ in range(3))
    mask = torch.rand(6, 9, generator=generator) < 0.8
    rewards, groups = torch.rand(6, generator=generator), torch.tensor([0, 0, 0, 1, 1, 1])
    advantages = objective.grpo_advantages(rewards, groups)
    clip = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "num_tokens": int(mask.sum())}
    more = {"clip_ratio_c": 3.0, "ref_logprobs": ref, "kl_coef": 0.01}
    low, high = objective.lopti_split(old, mask, eta=0.5)
    found = {
        "grpo": advantages,
        "reinforce_pp": objective.reinforce_pp_advantages(rewards, old, ref, mask, kl_coef=0.01),
        "reweight": objective.reweight(advantages, old, alpha=0.3),
        "low": low,
        "high": high,
        "loss": objective.policy_loss(new, old, advantages, mask, **clip, **more),
        "weights": objective.token_weights(new, old, advantages, mask, **clip, **more),
    }
    return {name: value.flatten().tolist() for name, value in found.items()}


def call_theory() -> dict[str, list]:
    logprobs = torch.log_softmax(torch.randn(8, 50, generator=torch.Generator().manual_seed(1)), -1)
    ids = torch.arange(8)
    own = logprobs[torch.arange(8), ids]
    rest = torch.log1p(-own.exp())
    bounds = theory.logit_grad_bounds(rest, 50)
    found = {"norm": theory.logit_grad_norm(logprobs, ids), "lower": bounds[0], "upper": bounds[1]}
    return {name: value.flatten().tolist() for name, value in found.items()}


def write_json(path: Path, value: dict[str, list]) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


if __name__ == "__main__":
    pd.set_option("mode.copy_on_write", True)
    main(*map(Path, sys.argv[1:]))
