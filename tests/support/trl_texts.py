"""Short TRL trainings on given text: prompts, chosen and rejected answers of a tiny policy that speaks in w4 … w95."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from .policies import make_tokenizer
from .trl_runs import import_trl

CONFIGS = {"SFTTrainer": "SFTConfig", "DPOTrainer": "DPOConfig", "KTOTrainer": "KTOConfig"}
SETTINGS = {
    "per_device_train_batch_size": 3,
    "gradient_accumulation_steps": 2,
    "learning_rate": 3e-3,
    "lr_scheduler_type": "constant",
    "max_steps": 2,
    "max_grad_norm": 1e9,  # clipping at a norm that is never reached changes no bit
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "use_cpu": True,
}


def make_texts(kind: str, rows: int = 11) -> dict[str, list[Any]]:
    """Columns of a dataset: texts of unequal lengths, some of one word."""
    draw = random.Random(0)

    def words(least: int, most: int) -> str:
        return " ".join(f"w{draw.randint(4, 95)}" for _ in range(draw.randint(least, most)))

    prompts, chosen, rejected = ([words(*sizes) for _ in range(rows)] for sizes in ((2, 6), (1, 9), (1, 9)))
    chosen = [f" {text}" for text in chosen]
    if kind == "DPOTrainer":
        return {"prompt": prompts, "chosen": chosen, "rejected": [f" {text}" for text in rejected]}
    labels = {"label": [bool(draw.getrandbits(1)) for _ in range(rows)]} if kind == "KTOTrainer" else {}
    return {"prompt": prompts, "completion": chosen} | labels


def make_text_trainer(
    checkpoint: Path, out: Path, kind: str, *, texts: Any = None, made: Any = None, peft: Any = None, **settings: Any
) -> Any:
    """A trainer of that kind, six rows to a step in two micro-batches, whose policy is not the reference.

    texts: columns of its dataset; None: `make_texts`. made: the class, if it is a subclass. peft: of an adapter.
    """
    from datasets import Dataset

    trl = import_trl()
    config = getattr(trl, CONFIGS[kind])(output_dir=str(out), **SETTINGS | settings)
    more = {} if peft is None else {"peft_config": peft}
    if kind != "SFTTrainer" and peft is None and not settings.get("precompute_ref_log_probs"):
        more["ref_model"] = AutoModelForCausalLM.from_pretrained(checkpoint)
    trainer = (made or getattr(trl, kind))(
        model=AutoModelForCausalLM.from_pretrained(checkpoint),
        args=config,
        train_dataset=Dataset.from_dict(texts or make_texts(kind)),
        processing_class=make_tokenizer(),
        **more,
    )
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            if parameter.requires_grad:
                parameter += 0.02 * torch.randn(parameter.shape, generator=draw)
    return trainer
