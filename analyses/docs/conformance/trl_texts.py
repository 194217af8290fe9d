"""TRL's trainers on given text: SFT, DPO and KTO, one real step of each loss."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from analyses.docs.conformance.row import Step
from analyses.docs.conformance.trl_grpo import Saver, make_lora
from gradscope.integrations.trl import RolloutWriter
from gradscope.objective import LossSettings
from gradscope.policy import load_policy
from gradscope.rollouts import read_dump
from tests.support.trl_runs import train
from tests.support.trl_texts import make_text_trainer


@dataclass(frozen=True)
class Case:
    """A loss of one trainer."""

    kind: str
    documented: str
    settings: dict[str, Any] = field(default_factory=dict)
    micro_batches: int = 2
    lora: bool = False

    def __str__(self) -> str:
        told = [f"{name}={value}" for name, value in self.settings.items()]
        told += [f"gradient_accumulation_steps={self.micro_batches}"] if self.micro_batches > 1 else []
        return ", ".join([*told, *(["LoRA"] if self.lora else [])])


TOKENS, PAIRS, TEXTS = "mean over the tokens of the step", "mean over the pairs", "mean over the texts"
CASES = (
    Case("SFTTrainer", TOKENS, {"loss_type": "nll"}, 1),
    Case("SFTTrainer", TOKENS, {"loss_type": "nll"}),
    Case("SFTTrainer", TOKENS, {"loss_type": "nll"}, 2, lora=True),
    Case("SFTTrainer", TOKENS, {"loss_type": "dft"}, 1),
    Case("SFTTrainer", TOKENS, {"loss_type": "dft"}),
    Case("DPOTrainer", PAIRS, {"loss_type": ["sigmoid"]}, 1),
    Case("DPOTrainer", PAIRS, {"loss_type": ["sigmoid"]}),
    Case("DPOTrainer", PAIRS, {"loss_type": ["sigmoid"]}, 2, lora=True),
    Case("DPOTrainer", PAIRS, {"loss_type": ["ipo"]}),
    Case("KTOTrainer", TEXTS, {"loss_type": "kto"}, 1),
    Case("KTOTrainer", TEXTS, {"loss_type": "kto", "undesirable_weight": 1.5}),
)
SIZE = 6
"""Rows of the dataset in a step."""


def run(case: Case, checkpoint: Path, folder: Path) -> Step:
    """Take one step."""
    settings = {"per_device_train_batch_size": SIZE // case.micro_batches, "max_steps": 1}
    settings |= {"gradient_accumulation_steps": case.micro_batches, **case.settings}
    peft = make_lora() if case.lora else None
    trainer = make_text_trainer(checkpoint, folder, case.kind, peft=peft, **settings)
    writer, saver = RolloutWriter(trainer), Saver(trainer, folder / "before", 1)
    trainer.add_callback(writer)
    trainer.add_callback(saver)
    train(trainer)
    policy = load_policy(folder / "before", params="adapter") if case.lora else load_policy(folder / "before")
    dump = read_dump(writer.folder, policy)
    batch, loss = dump.batch, LossSettings.from_log(dump.loss)
    counts = {TOKENS: batch.num_tokens, TEXTS: len(batch), PAIRS: len(batch) // 2}
    divisors = torch.full((len(batch),), float(counts[case.documented]))
    plain = replace(batch, loss_scales=None)
    size = None if case.micro_batches == 1 else len(batch) // case.micro_batches
    return Step(policy, plain, saver.gradient, loss, size, divisors)


def steps(checkpoint: Path, folder: Path) -> Iterator[tuple[tuple[str, str, str], Any]]:
    """Iterate over trainers, cases, what is documented, and functions that take the step."""
    for number, case in enumerate(CASES):
        yield (f"TRL {case.kind}", str(case), case.documented), partial(run, case, checkpoint, folder / f"text{number}")
