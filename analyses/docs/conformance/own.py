"""The trainer here: the last optimizer step of real runs of `gradscope.trainer.train` on the embedded policy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from analyses.docs.conformance.row import Step
from gradscope.policy import load_policy
from gradscope.trainer import TrainConfig, train

SMALL = TrainConfig(
    people=(2,),
    steps=1,
    questions_per_step=3,
    group_size=4,
    mini_batch_size=12,
    micro_batch_size=5,
    max_new_tokens=40,
    temperature=1.0,
    learning_rate=1e-3,
    max_grad_norm=1e6,  # not reached
    trackers=(),
)
CASES: tuple[dict[str, Any], ...] = (
    {},
    {"mini_batch_size": 6, "kl_coef": 0.1},
    {"mini_batch_size": 6, "reweight_alpha": 0.3},
    {"mini_batch_size": 6, "algorithm": "reinforce++"},
    {"mini_batch_size": 6, "method": "cispo:eps_high=1.05"},
)
DOCUMENTED = "mean over the tokens of the mini-batch"


def run(case: dict[str, Any], folder: Path) -> Step:
    """Train a step, and return its last optimizer step."""
    config, seen = replace(SMALL, **case), {}

    @contextmanager
    def watch(step: Any) -> Iterator[None]:
        seen.update(model=step.policy.model, batch=step.batch)
        yield

    def before_step(*_: Any) -> None:
        named = [*seen["model"].named_parameters()]
        seen["weights"] = {name: p.detach().clone() for name, p in named}
        seen["gradient"] = {name: p.grad.clone() for name, p in named if p.grad is not None}

    handle = register_optimizer_step_pre_hook(before_step)
    try:
        train(config, folder, on_step=watch, progress=False)
    finally:
        handle.remove()
    policy, size = load_policy(config.model), config.mini_batch_size
    policy.model.load_state_dict(seen["weights"], strict=False)
    batch = seen["batch"].select(torch.arange(len(seen["batch"])).split(size)[-1])
    loss = replace(config.loss, weighting=config.method or config.loss.weighting)
    return Step(policy, batch, seen["gradient"], loss, None, torch.full((len(batch),), float(batch.num_tokens)))


def steps(folder: Path) -> Iterator[tuple[tuple[str, str, str], Any]]:
    """Iterate over trainers, cases, what is documented, and functions that take the step."""
    for number, case in enumerate(CASES):
        told = ", ".join(f"{name}={value}" for name, value in case.items()) or "the defaults"
        yield ("gradscope trainer", told, DOCUMENTED), partial(run, case, folder / f"own{number}")
