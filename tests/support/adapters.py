"""LoRA adapters with nothing left at its initial value."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from gradscope.policy import load_policy

peft = pytest.importorskip("peft")


def save_adapter(folder: Path, base: Path, **settings: Any) -> Path:
    """An adapter with nothing left at its initial value, as peft saves it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        adapted = peft.get_peft_model(load_policy(base).model, peft.LoraConfig(**settings))
        with torch.no_grad():
            for parameter in adapted.parameters():
                if parameter.requires_grad:
                    parameter += 0.1 * torch.randn(parameter.shape)
    with warnings.catch_warnings():
        # peft takes the vectors of lora_bias for shards that nobody gathered.
        warnings.filterwarnings("ignore", "Adapter .* invalid shape")
        adapted.save_pretrained(folder)
    return folder
