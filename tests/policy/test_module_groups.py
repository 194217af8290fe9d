"""Parameters by layer and module group."""

from __future__ import annotations

import pytest
from support.policies import make_policy

from gradscope.policy import module_groups

NAMES = {
    "qwen2": {
        "model.embed_tokens.weight": (None, "embedding and head"),
        "model.layers.1.self_attn.q_proj.bias": (1, "attention q"),
        "model.layers.2.self_attn.o_proj.weight": (2, "attention o"),
        "model.layers.0.mlp.down_proj.weight": (0, "MLP"),
        "model.layers.0.post_attention_layernorm.weight": (0, "norms"),
        "model.norm.weight": (None, "norms"),
    },
    "llama": {"model.embed_tokens.weight": (None, "embedding"), "lm_head.weight": (None, "head")},
    "gpt2": {
        "transformer.wpe.weight": (None, "embedding"),
        "transformer.h.1.attn.c_attn.weight": (1, "attention q, k, v"),
        "transformer.h.1.attn.c_proj.bias": (1, "attention o"),
        "transformer.h.1.mlp.c_proj.bias": (1, "MLP"),
        "transformer.h.0.ln_1.bias": (0, "norms"),
    },
    "opt": {"model.decoder.layers.0.fc1.weight": (0, "MLP")},
    "qwen3_moe": {
        "model.layers.0.self_attn.k_norm.weight": (0, "norms"),
        "model.layers.1.mlp.experts.gate_up_proj": (1, "MLP"),
    },
}


@pytest.mark.parametrize("kind", NAMES)
def test_parameters_are_found_by_layer_and_group(kind):
    found = module_groups(make_policy(kind))
    assert {name: found[name] for name in NAMES[kind]} == NAMES[kind]
    assert not {"other", "attention"} & {group for _, group in found.values()}
