"""What writers of sharded checkpoints share: a tiny model, its steps, and the packing of what was written."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

import torch
import transformers
from torch import Tensor

VOCAB = 24
STEPS = 2
SETTINGS = {"lr": 1e-3, "betas": (0.9, 0.98)}


def tiny_model() -> transformers.PreTrainedModel:
    """Two blocks of eight dimensions, the head tied."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "architectures": ["Qwen2ForCausalLM"]}
    sizes = {"vocab_size": VOCAB, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2}
    config = transformers.Qwen2Config(**sizes, **heads, tie_word_embeddings=True, max_position_embeddings=64)
    torch.manual_seed(0)
    return transformers.Qwen2ForCausalLM(config)


def rows(step: int, rank: int) -> Tensor:
    """Ids [2, 12] that a rank trains on in a step."""
    return torch.randint(4, VOCAB, (2, 12), generator=torch.Generator().manual_seed(10 * step + rank))


def pack(out: Path) -> None:
    """OUT.tar.xz of what is in OUT, but for scripts and what tells of the machine."""
    with tarfile.open(f"{out}.tar.xz", "w:xz") as archive:
        for file in sorted(out.rglob("*")):
            if file.is_file() and file.suffix != ".py" and "extra_state" not in file.name:
                info = archive.gettarinfo(str(file), os.path.relpath(file, out))
                info.mtime, info.uid, info.gid, info.uname, info.gname = 0, 0, 0, "", ""
                with file.open("rb") as handle:
                    archive.addfile(info, handle)
