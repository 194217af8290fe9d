"""Learners and optimizers that have taken a few steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor, nn

from gradscope.objective import StepTokens, resolve_advantages, split_steps
from gradscope.trainer import TrainConfig
from gradscope.trainer.learner import Learner, build_learner
from support.policies import VOCAB, make_batch


def make_learner(model: str | Path, checkpoint: Path | None = None, **settings: object) -> Learner:
    """A learner of one process on the CPU."""
    AcceleratorState._reset_state(reset_partial_state=True)  # another test may have taken a GPU
    given = {"kl_coef": 0.0, "micro_batch_size": 3, "learning_rate": 1e-2, "steps": 1} | settings
    return build_learner(TrainConfig(model=str(model), **given), Accelerator(cpu=True), checkpoint)


def make_steps(policy, size: int = 6, **settings: object) -> list[StepTokens]:
    """Passes over a batch with advantages and everything else that a loss asks for."""
    batch = make_batch(policy, **settings)
    return split_steps(replace(batch, advantages=resolve_advantages(batch)), size, [("all", batch.response_mask)])


STEPS = 3


def train(model: nn.Module, out: Path) -> dict[str, Tensor]:
    """Train with transformers' Trainer, which saves checkpoint-3; the live optimizer's exp_avg_sq by its names."""
    from transformers import Trainer, TrainingArguments

    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(4, VOCAB, (12,), generator=generator).tolist() for _ in range(8)]
    steps = {"max_steps": STEPS, "save_steps": STEPS, "per_device_train_batch_size": 2}
    quiet = {"use_cpu": True, "report_to": [], "disable_tqdm": True}
    arguments = TrainingArguments(str(out), weight_decay=0.1, **steps, **quiet)
    trainer = Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in rows])
    trainer.train()
    state = trainer.optimizer.state
    named = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
    return {name: state[p]["exp_avg_sq"] for name, p in named.items() if "exp_avg_sq" in state[p]}
