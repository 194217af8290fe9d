"""TRL's trainers of distillation: one real step each, against the exact gradient of the divergence's mean."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from analyses.docs.conformance.trl_grpo import make_lora, shorten
from gradscope.gradients import TokenJacobian
from gradscope.objective import Divergence
from gradscope.policy import Policy, load_policy, plain_name
from gradscope.rollouts import Response, TokenBatch, collate
from tests.support.policies import make_tokenizer
from tests.support.trl_runs import PROMPTS, Recorder, train

SIZE, EXACT = 8, 1e-5
"""Responses of a step; largest relative distance of two programs' float32 gradients."""
GLOBAL = "mean over the tokens of the global batch"


@dataclass(frozen=True)
class Case:
    """A divergence of one trainer."""

    kind: str
    settings: dict[str, Any] = field(default_factory=dict)
    micro_batches: int = 2
    lora: bool = False

    def __str__(self) -> str:
        told = [f"{name}={value}" for name, value in self.settings.items()]
        told += [f"gradient_accumulation_steps={self.micro_batches}"] if self.micro_batches > 1 else []
        return ", ".join([*told, *(["LoRA"] if self.lora else [])])


CASES = (
    Case("DistillationTrainer", {"beta": 1.0}, 1),
    Case("DistillationTrainer", {"beta": 1.0}),
    Case("DistillationTrainer", {"beta": 0.0, "temperature": 0.7}),
    Case("DistillationTrainer", {"beta": 0.5}, lora=True),
    Case("GKDTrainer", {"beta": 0.5, "lmbda": 0.0}, 1),
    Case("GKDTrainer", {"beta": 0.5, "lmbda": 0.0}),
    Case("GKDTrainer", {"beta": 1.0, "lmbda": 0.0, "temperature": 0.7}),
    Case("GKDTrainer", {"beta": 0.5, "lmbda": 1.0}, 1),
    Case("GKDTrainer", {"beta": 0.5, "lmbda": 1.0}),
)


def make_trainer(case: Case, checkpoint: Path, folder: Path) -> Any:
    """Return the trainer, whose teacher has other weights."""
    from datasets import Dataset
    from peft import get_peft_model
    from trl import DistillationConfig, DistillationTrainer
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    own, settings = case.kind == "DistillationTrainer", dict(case.settings)
    settings |= {"per_device_train_batch_size": SIZE // case.micro_batches, "max_steps": 1, "learning_rate": 1e-3}
    settings |= {"gradient_accumulation_steps": case.micro_batches, "max_grad_norm": 1e9, "report_to": "none"}
    settings |= {"bf16": False, "use_cpu": True, "gradient_checkpointing": False, "disable_tqdm": True}
    settings |= {"max_completion_length" if own else "max_new_tokens": 10, "save_strategy": "no"}
    model, teacher = (AutoModelForCausalLM.from_pretrained(checkpoint) for _ in range(2))
    draw = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=draw)
    if case.lora:
        model = get_peft_model(model, make_lora())
    answers = [" ".join(f"w{4 + (7 * n + k) % 92}" for k in range(1 + n)) for n in range(SIZE)]
    prompts = [PROMPTS[n % len(PROMPTS)] for n in range(SIZE)]
    rows = {"prompt": prompts} if own else {"messages": [_talk(*pair) for pair in zip(prompts, answers, strict=True)]}
    config, kind = (DistillationConfig, DistillationTrainer) if own else (GKDConfig, GKDTrainer)
    trainer = kind(
        model=model,
        teacher_model=teacher,
        args=config(output_dir=str(folder), **settings),
        train_dataset=Dataset.from_dict(rows),
        processing_class=make_tokenizer(chat=not own),
    )
    if own:
        shorten(trainer)
    else:
        trainer.generation_config.eos_token_id = list(range(4, 20))
    return trainer


def _talk(prompt: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]


def read_batch(window: Sequence[Mapping[str, Tensor]], temperature: float) -> TokenBatch:
    """Return the tokens of a step's micro-batches, whose loss is at the given temperature."""
    rows = []
    for inputs in window:
        if "labels" in inputs:
            ids, real, kept = inputs["input_ids"], inputs["attention_mask"], inputs["labels"] != -100
        else:
            sides = [[inputs[f"{side}_{what}"] for side in ("prompt", "completion")] for what in ("ids", "mask")]
            ids, real = (torch.cat(own, 1) for own in sides)
            kept = real.bool() & (torch.arange(ids.shape[1]) >= inputs["prompt_ids"].shape[1])
        for own, inside, mask in zip(ids, real.bool(), kept, strict=True):
            whole, start = own[inside].tolist(), int(mask[inside].int().argmax())
            told = mask[inside][start:].tolist()
            rows.append(Response(whole[:start], whole[start:], temperature=temperature, response_mask=told))
    return collate(rows)


@dataclass(frozen=True)
class Taken:
    """A real step."""

    case: Case
    policy: Policy
    """The weights before it."""
    teacher: Any
    batch: TokenBatch
    gradient: Mapping[str, Tensor]


def run(case: Case, checkpoint: Path, folder: Path) -> Taken:
    """Take a step."""
    trainer = make_trainer(case, checkpoint, folder)
    recorder, before = Recorder(trainer), folder / "before"
    trainer.save_model(str(before))
    train(trainer)
    [step] = recorder.steps
    policy = load_policy(before, params="adapter") if case.lora else load_policy(before)
    # GKD's temperature is documented as that of sampling alone.
    at = case.settings.get("temperature", 1.0) if case.kind == "DistillationTrainer" else 1.0
    return Taken(case, policy, trainer.teacher_model, read_batch(step["window"], at), step["gradient"])


def judge(taken: Taken) -> dict[str, str]:
    """Return the columns of a step: which average of the divergence's exact gradients its gradient is a multiple of."""
    batch, count = taken.batch, taken.case.micro_batches
    J, quantity = TokenJacobian(taken.policy, batch), Divergence(taken.case.settings["beta"], taken.teacher)
    response, lengths = batch.response_mask.nonzero()[:, 0], batch.response_mask.sum(1)
    part = torch.arange(len(batch)) // (SIZE // count)
    divisors = {"token-mean": torch.full((len(batch),), batch.num_tokens), "sequence-mean": lengths * len(batch)}
    divisors |= {"micro-batches": (torch.bincount(part, lengths) * count)[part]} if count > 1 else {}
    ours = J.vjp(torch.stack([1 / own[response].float() for own in divisors.values()]), of=quantity)
    theirs = torch.zeros_like(ours.rows[0])
    for name, own in taken.gradient.items():
        theirs[ours.slices[plain_name(name, set(ours.slices))]] = own.flatten()
    fits = {}
    for name, own in zip(divisors, ours.rows, strict=True):
        factor = float(theirs @ own / (own @ own))
        fits[name] = factor, float((theirs - factor * own).norm() / theirs.norm())
    reading = min(fits, key=lambda name: fits[name][1])
    factor, distance = fits[reading]
    documented = reading == "token-mean" and distance < EXACT and abs(factor - 1) < EXACT
    return {
        **{"agrees": "yes" if documented else "no", "reading": reading if distance < EXACT else "none"},
        **{"factor": f"{factor:.4g}", "distance": f"{distance:.1e}", "responses": str(len(batch))},
        **{"tokens": str(batch.num_tokens)},
        "reason": "" if documented else f"The trainer's gradient is {factor:.4g} times that of the {reading}",
    }


def steps(checkpoint: Path, folder: Path) -> Iterator[tuple[tuple[str, str, str], Any]]:
    """Iterate over trainers, cases, what is documented, and functions that take the step."""
    for number, case in enumerate(CASES):
        take = partial(run, case, checkpoint, folder / f"distillation{number}")
        yield (f"TRL {case.kind}", str(case), GLOBAL), take
