"""Policies of real size with random weights and spread probabilities, their rollouts and optimizer state.

A checkpoint is written shard by shard, so making one needs no more memory than a block and the embeddings. Matrices
have a standard deviation of 1/√inputs, at which the blocks outweigh the last token's own embedding, which a tied table
adds to the logits; at .6/√inputs the last token is repeated forever. The last norm is scaled so that logits have a
standard deviation of 1.6·√(2 log vocabulary): the gaps between the likeliest tokens are then the same at every
vocabulary size, and about .4, .2, .2 and .3 of the sampled tokens have π in the four intervals.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from gradscope.policy import load_policy

Size = Literal["1m", "30m", "0.5b", "1.5b", "7b", "32b", "llama-8b"]
_QWEN = {"model_type": "qwen2", "num_key_value_heads": 2, "tie_word_embeddings": True, "rms_norm_eps": 1e-6}
_QWEN |= {"max_position_embeddings": 32_768, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
SHAPES: dict[Size, dict[str, Any]] = {
    "1m": _QWEN
    | {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
    | {"intermediate_size": 384, "vocab_size": 4000},
    "30m": _QWEN
    | {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 6}
    | {"intermediate_size": 2048, "vocab_size": 32_000},
    "0.5b": _QWEN
    | {"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14}
    | {"intermediate_size": 4864, "vocab_size": 151_936},
    "1.5b": _QWEN
    | {"hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12}
    | {"intermediate_size": 8960, "vocab_size": 151_936},
    "7b": _QWEN
    | {"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4}
    | {"intermediate_size": 18_944, "vocab_size": 152_064, "tie_word_embeddings": False},
    "32b": _QWEN
    | {"hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 40, "num_key_value_heads": 8}
    | {"intermediate_size": 27_648, "vocab_size": 152_064, "tie_word_embeddings": False},
    "llama-8b": {
        "model_type": "llama",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14_336,
        "vocab_size": 128_256,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    },
}
"""Configurations: Qwen2.5's 0.5B, 1.5B, 7B and 32B, Llama-3's 8B, and two of Qwen2's kind for tests."""
EMBEDDING_SD, BLOCK_SD, SPREAD = 0.02, 1.0, 1.6
STATE_STEPS = 100
"""Steps in the optimizer's state."""


def make_config(size: Size, dtype: torch.dtype = torch.float32, **changes: int) -> Any:
    """Return the configuration as transformers saves it, with `changes` to the size's numbers."""
    from transformers import AutoConfig

    settings = SHAPES[size] | changes
    config = AutoConfig.for_model(settings.pop("model_type"), **settings, pad_token_id=0, eos_token_id=None)
    config.dtype = dtype
    return config


def write_checkpoint(
    folder: Path, size: Size, dtype: torch.dtype = torch.float32, *, seed: int = 0, **changes: int
) -> None:
    """Write a folder that transformers loads, one shard per block, without a tokenizer."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    config = make_config(size, dtype, **changes)
    config.architectures = [type(_outline(config)).__name__]
    config.save_pretrained(folder)
    shards = _shards(_outline(config))
    generator, places, total = torch.Generator().manual_seed(seed), {}, 0
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {name: _draw(name, shape, config, generator).to(dtype) for name, shape in names.items()}
        save_file(tensors, folder / file, {"format": "pt"})
        places |= dict.fromkeys(tensors, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def write_state(file: Path, size: Size, *, seed: int = 1) -> None:
    """Write the policy's AdamW state dict in float32, as torch saves it; 8 bytes a parameter on disk.

    The moments are drawn in a temporary file of the same size instead of in memory.
    """
    generator, state, drawn = torch.Generator().manual_seed(seed), {}, file.with_suffix(".moments")
    shapes = [p.shape for _, p in _outline(make_config(size)).named_parameters()]
    try:
        with drawn.open("wb") as empty:
            empty.truncate(8 * sum(shape.numel() for shape in shapes))
        start = 0
        for index, shape in enumerate(shapes):
            numbers = np.memmap(drawn, np.float32, "r+", start, (2, *shape))
            # Two arrays and two storages, as torch writes them.
            first, second = (torch.from_numpy(values) for values in numbers)
            first.normal_(0, 1e-5, generator=generator)
            second.uniform_(1e-12, 1e-9, generator=generator)
            state[index] = {"step": torch.tensor(float(STATE_STEPS)), "exp_avg": first, "exp_avg_sq": second}
            start += numbers.nbytes
        group = {"lr": 1e-6, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False}
        group |= {"maximize": False, "foreach": None, "capturable": False, "differentiable": False, "fused": None}
        group |= {"decoupled_weight_decay": True, "params": list(range(len(shapes)))}
        torch.save({"state": state, "param_groups": [group]}, file)
    finally:
        drawn.unlink(missing_ok=True)


@torch.no_grad()
def write_rollouts(
    file: Path,
    policy_folder: Path | None,
    size: Size,
    *,
    prompts: int,
    responses: int,
    prompt_length: int,
    response_length: int,
    device: str | None = None,
    seed: int = 2,
) -> None:
    """Write responses sampled from the policy at temperature 1 to random prompts; half of each prompt's are rewarded.

    policy_folder: None writes random ids as responses, for plans, which use no weights.
    """
    generator, vocab = torch.Generator().manual_seed(seed), SHAPES[size]["vocab_size"]
    asked = torch.randint(10, vocab, (prompts, prompt_length), generator=generator)
    told = torch.randint(10, vocab, (prompts * responses, response_length), generator=generator)
    if policy_folder is not None:
        model = load_policy(policy_folder, dtype=_own_dtype(policy_folder), device=device).model
        ids = asked.repeat_interleave(responses, 0).to(model.device)
        torch.manual_seed(seed)
        settings = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        settings |= {"max_new_tokens": response_length, "min_new_tokens": response_length}
        told = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[:, prompt_length:].cpu()
    rewarded = torch.stack([torch.randperm(responses, generator=generator) < responses // 2 for _ in range(prompts)])
    with file.open("w", encoding="utf-8") as out:
        for row, reward in enumerate(rewarded.flatten().tolist()):
            prompt = row // responses
            values = {"prompt_ids": asked[prompt].tolist(), "response_ids": told[row].tolist()}
            values |= {"reward": float(reward), "group": str(prompt), "temperature": 1.0}
            out.write(json.dumps(values) + "\n")


def _own_dtype(folder: Path) -> str:
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))["dtype"]


def _outline(config: Any) -> nn.Module:
    """Build the model without memory for weights."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def _shards(model: nn.Module) -> list[dict[str, torch.Size]]:
    """Return the names and shapes in each file: one per block, and one per embedding or head matrix."""
    shards: dict[str, dict[str, torch.Size]] = {}
    for name, parameter in model.named_parameters():
        parts = name.split(".layers.")
        key = f"block {parts[1].split('.')[0]}" if len(parts) > 1 else name
        shards.setdefault(key, {})[name] = parameter.shape
    return list(shards.values())


def _draw(name: str, shape: torch.Size, config: Any, generator: torch.Generator) -> Tensor:
    hidden, vocab = config.hidden_size, config.vocab_size
    if name == "model.norm.weight":
        return torch.full(shape, SPREAD * math.sqrt(2 * math.log(vocab)) / (EMBEDDING_SD * math.sqrt(hidden)))
    if name.endswith("norm.weight"):
        return torch.ones(shape)
    outer = shape[-1:] == (hidden,) and shape[0] == vocab
    sd = EMBEDDING_SD if outer or len(shape) == 1 else BLOCK_SD / math.sqrt(shape[-1])
    return torch.randn(shape, generator=generator) * sd


def interval_counts(file: Path, policy_folder: Path) -> Iterator[int]:
    """Count the rollouts' response tokens with π in each of the four intervals."""
    from gradscope.objective import batch_statistics
    from gradscope.rollouts import read_rollouts

    policy = load_policy(policy_folder, dtype=_own_dtype(policy_folder))
    batch = read_rollouts(file, policy)
    found = batch_statistics(policy.model, batch, micro_batch_size=1, device=policy.device)
    prob = found.logprob[batch.response_mask].exp()
    yield from torch.histogram(prob, torch.tensor([0, 0.25, 0.5, 0.75, 1.0])).hist.int().tolist()
