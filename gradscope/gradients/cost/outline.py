"""The network of a model that may not be here yet: its configuration and its shape, without a weight."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from gradscope.errors import BROKEN_FILE, InputError
from gradscope.gradients.cost.shape import ModelShape
from gradscope.policy import EMBEDDED, Policy, find_blocks, load_tokenizer

_QWEN_7B = {
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Qwen/Qwen2.5-3B-Instruct": {
        "hidden_size": 2048,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "intermediate_size": 11008,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
        "max_position_embeddings": 32768,
    },
    "Qwen/Qwen2.5-7B-Instruct-1M": _QWEN_7B | {"max_position_embeddings": 1010000},
    "Qwen/Qwen2.5-7B": _QWEN_7B | {"max_position_embeddings": 131072},
}
"""The presets' models as arguments of transformers' Qwen2Config, so that a run is planned before they are fetched."""


def shape_of(model: str) -> ModelShape:
    """The shape of an embedded policy, of a folder with config.json, or of a model of the presets, without its weights.

    Raises InputError for any other name, and for a folder whose config.json is not a causal language model's.
    """
    return ModelShape.from_config(config_of(model))


def config_of(model: str) -> Any:
    """Its configuration, for transformers; the same names, and the same errors."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config

    folder = Path(EMBEDDED.get(model, model))
    if not os.path.isfile(folder / "config.json"):  # of a name that is too long, Path raises
        if model not in ARCHITECTURES:
            raise InputError(
                f"the network of {model!r} is not known here; give a folder with its config.json (the weights need not "
                f"be there), or one of {', '.join([*EMBEDDED, *ARCHITECTURES])}"
            )
        return Qwen2Config(**ARCHITECTURES[model])
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (*BROKEN_FILE, StrictDataclassError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".!:")
        raise InputError(f"{folder}/config.json is not one that transformers reads ({reason}); save it anew") from error
    if getattr(config, "is_encoder_decoder", False) or type(config) not in AutoModelForCausalLM._model_mapping:
        raise InputError(f"{folder} is a {config.model_type} model, not a causal language model; give one that is")
    return config


def outline_policy(model: str, blocks: str | None = None) -> Policy:
    """The policy without memory for weights: its configuration, its tokenizer and its modules on the meta device.

    model: a folder with config.json, "embedded", or a model of the presets.
    """
    from transformers import AutoModelForCausalLM

    config = config_of(model)
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(config).eval()
    folder = Path(EMBEDDED.get(model, model))
    tokenizer = load_tokenizer(folder) if folder.is_dir() else None
    return Policy(network, tokenizer, find_blocks(network, blocks), model)
