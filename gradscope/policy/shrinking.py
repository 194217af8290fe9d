"""Configurations of small models: any architecture, with a width of 32 and four layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from gradscope.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

HIDDEN, CONTEXT, VOCAB = 32, 64, 96
SMALL = 2_000_000
"""Most parameters of a model that is small enough as it is."""
SIZES: dict[str, int] = {
    name: size
    for size, names in {
        VOCAB: "vocab_size vocab_size_per_layer_input encoder_hash_byte_group_vocab unpadded_vocab_size",
        CONTEXT: "max_position_embeddings n_positions n_ctx max_seq_len context_length model_max_length mamba_d_ssm "
        "original_max_position_embeddings",
        48: "intermediate_size ffn_dim dim_ff dff ffn_hidden_size d_inner feed_forward_size intermediate_size_mlp "
        "dense_intermediate_size n_inner decoder_ffn_dim",
        # With fewer heads of an index, no head likes some of the keys, and which of those are taken is chance.
        HIDDEN: "hidden_size d_model n_embd emb_dim embedding_dim embedding_size lru_width word_embed_proj_dim "
        "input_embedding_size output_embedding_size dim_model_base hidden_size_global index_n_heads",
        24: "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size expert_ffn_hidden_size "
        "moe_shared_expert_intermediate_size router_hidden_size",
        16: "q_lora_rank hidden_size_per_layer_input o_lora_rank laurel_rank hc_lowrank",
        8: "head_dim kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim index_head_dim linear_key_head_dim "
        "linear_value_head_dim linear_head_dim swa_head_dim d_head dim_head kv_channels mamba_d_head mamba_head_dim "
        "mamba_headdim mamba_d_state state_size ssm_state_size rotary_dim chunk_size mamba_chunk_size "
        "attention_head_size query_pre_attn_scalar d_rel n_routed_experts adapter_rank block_size gated_norm_rank "
        "sliding_window sliding_window_size attention_window_size window_size local_attention attention_chunk_size "
        "index_topk mamba_n_heads mamba_num_heads n_mamba_heads",
        4: "num_hidden_layers n_layer n_layers num_layers num_blocks decoder_layers num_attention_heads n_head n_heads "
        "num_heads attention_heads decoder_attention_heads num_experts num_local_experts moe_num_experts "
        "linear_num_value_heads linear_num_heads swa_num_attention_heads",
        2: "num_key_value_heads num_kv_heads num_experts_per_tok num_experts_per_token moe_k moe_topk "
        "linear_num_key_heads swa_num_key_value_heads n_groups num_shared_experts n_shared_experts "
        "moe_num_shared_experts n_group num_expert_group",
        1: "topk_group first_k_dense_replace num_dense_layers",
        0: "num_nextn_predict_layers pad_token_id",
    }.items()
    for name in names.split()
} | {"bos_token_id": 1, "eos_token_id": 2}
"""What configurations call their sizes, and how large they are here."""
DEPTHS = {"num_hidden_layers", "num_blocks", "depth"}
WINDOWS = ["sliding_attention", "full_attention"] * 2
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
EXCEPTIONS: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE | {"mrope_section": [1, 1, 2]}}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots3_note_audio_encoder": {"adapter_input_size": HIDDEN, "adapter_out_dim": HIDDEN},
    "dots3_note_text": {
        **{"swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_q_lora_rank": 16, "swa_kv_lora_rank": 8},
        **{"swa_head_dim": 16, "swa_qk_nope_head_dim": 8, "swa_v_head_dim": 8},
    },
    "dots3_note_vision_encoder": {
        **{"mlp_layer_types": ["dense", "sparse"], "adapter_in_dim": HIDDEN, "adapter_out_dim": HIDDEN},
    },
    "dory": {"n_input_layers": 1, "n_output_layers": 1},
    "gemma3_text": {"layer_types": WINDOWS},
    "gemma3n_text": {"layer_types": WINDOWS, "num_kv_shared_layers": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8},
    "qwen4_exp_text": {
        name: 2 if name == "indexer_compress_ratio" else 1 if name == "indexer_kv_heads" else 8
        for name in (
            *("indexer_n_heads", "indexer_kv_heads", "indexer_head_dim", "indexer_budget", "indexer_compress_ratio"),
        )
    },
    "reformer": {"axial_pos_embds": False, "attn_layers": ["local", "lsh"] * 2},
    "xlm": {"causal": True, "pad_token_id": 2},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 6, "attn_layer_period": 3, "attn_layer_offset": 2},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
}
"""What the sizes alone do not say, by model type: patterns of layers, and what a class insists on."""
PER_LAYER = ("layer_types", "dtype", "transformers_version", "_name_or_path", "architectures", "model_type")
"""Settings of a checkpoint that do not outlive its shrinking: lists by layer, and what the writer adds."""


def shrink(config: PreTrainedConfig) -> dict[str, Any]:
    """Return settings that make it tiny, those of its parts among them; an encoder that can be a decoder is one."""
    settings: dict[str, Any] = {}
    names = config.to_dict().keys()
    for name in names:
        if name in config.sub_configs:
            part = getattr(config, name)
            settings[name] = None if part is None else shrink(part)
            if settings[name] and name != "text_config":  # another depth than the language model's tells them apart
                settings[name] |= dict.fromkeys(settings[name].keys() & DEPTHS, 2)
        elif name in SIZES:
            settings[name] = SIZES[name]
        elif name == "is_decoder":
            settings[name] = True
    if "kv_lora_rank" in names:  # latent attention has no groups of queries
        settings["num_key_value_heads"] = settings["num_attention_heads"]
    return settings | EXCEPTIONS.get(config.model_type, {})


def make_small_model(checkpoint: str, *, seed: int = 0, trust_remote_code: bool = False) -> PreTrainedModel:
    """Return the model in float32 if it is small, else one of its architecture, shrunk, with random weights.

    Raises InputError if its configuration cannot be shrunk.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    given = {"trust_remote_code": trust_remote_code}
    config = AutoConfig.from_pretrained(checkpoint, **given)
    with torch.device("meta"):
        size = AutoModelForCausalLM.from_config(config, **given).num_parameters()
    if size <= SMALL:
        return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, **given).eval()
    own = {name: value for name, value in config.to_diff_dict().items() if name not in PER_LAYER}
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            config = type(config)(**own | shrink(config))
            return AutoModelForCausalLM.from_config(config, dtype=torch.float32, **given).eval()
    except (ValueError, TypeError, RuntimeError) as error:
        raise InputError(
            f"{checkpoint} cannot be shrunk ({' '.join(str(error).split())[:200]}); give a checkpoint of its "
            f"architecture with at most {SMALL:,} parameters"
        ) from error
