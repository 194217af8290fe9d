"""Tiny models whose weights are packed in few bits; tests that import this are skipped without bitsandbytes."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
import transformers as hf
from torch import nn

from support.policies import VOCAB, make_tokenizer

pytest.importorskip("bitsandbytes")

SIZE = 64
"""bitsandbytes scales its four-bit numbers in blocks of 64."""


def packings() -> dict[str, object]:
    """How weights can be packed, as transformers configures it; torchao only where it is installed."""
    four = partial(hf.BitsAndBytesConfig, load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
    found = {
        "nf4": four(bnb_4bit_quant_type="nf4"),
        "fp4, scales packed too": four(bnb_4bit_quant_type="fp4", bnb_4bit_use_double_quant=True),
        "nf4, stored as bfloat16": four(bnb_4bit_quant_type="nf4", bnb_4bit_quant_storage=torch.bfloat16),
        "int8": hf.BitsAndBytesConfig(load_in_8bit=True),
    }
    try:
        from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig
    except ImportError:
        return found
    ours = hf.TorchAoConfig
    return found | {"torchao int8": ours(Int8WeightOnlyConfig()), "torchao fp8": ours(Float8WeightOnlyConfig())}


PACKINGS = packings()


def load_packed(folder: Path, **settings: object) -> nn.Module:
    """The packed model as transformers loads it, for training: its layers compute with the dequantized weights."""
    kind = hf.AutoModelForCausalLM
    return kind.from_pretrained(folder, dtype=torch.float32, device_map={"": "cpu"}, **settings).train()


def save_full(folder: Path) -> Path:
    """A tiny checkpoint in float32 whose layers can be packed: biases off 0, a size that their blocks divide."""
    sizes = {"hidden_size": SIZE, "intermediate_size": 2 * SIZE, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = hf.Qwen2Config(
        vocab_size=VOCAB, num_hidden_layers=2, max_position_embeddings=64, initializer_range=0.2, **sizes
    )
    torch.manual_seed(0)
    model = hf.Qwen2ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder
