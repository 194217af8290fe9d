"""Every causal language model that transformers knows, built tiny from its configuration, with random weights."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from gradscope.policy.shrinking import shrink

from .policies import fill_parameters

MODEL_TYPES: dict[str, str] = dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
"""Model type → class, of all that AutoModelForCausalLM loads."""
LEFT_OUT = {
    "gemma3n": "its vision tower needs the package timm; gemma3n_text is the language model alone",
    "gemma4_assistant": "drafts tokens from the hidden states of another model; no policy by itself",
    "gemma4_unified_assistant": "drafts tokens from the hidden states of another model; no policy by itself",
    "musicgen": "encoder-decoder: audio from a text encoder's states",
    "musicgen_melody": "encoder-decoder: audio from a text encoder's states",
}
"""Model types that are not tried, and why; encoder-decoders say so themselves."""


def left_out(kind: str) -> str | None:
    """Why this model type is not tried; None: it is."""
    if kind in LEFT_OUT:
        return LEFT_OUT[kind]
    return "encoder-decoder" if CONFIG_MAPPING[kind]().is_encoder_decoder else None


def make_shrunk_model(kind: str, *, seed: int = 0) -> PreTrainedModel:
    """A tiny model of that type in eval mode, in float32; nothing degenerate is left at its initial value."""
    config_class = CONFIG_MAPPING[kind]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = config_class(**shrink(config_class()))
        model = AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    for parameter in model.parameters():  # some are not initialised at all
        parameter.detach().nan_to_num_(0.0, 0.0, 0.0)
    fill_parameters(model, seed)
    return model.eval()
