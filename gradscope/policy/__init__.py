"""A loaded checkpoint or adapter, its tokenizer and blocks, and its saved optimizer."""

from gradscope.policy.adamw import (
    RATE,
    AdamWSettings,
    AdamWState,
    find_optimizer_file,
    find_policy_state,
    group_settings,
    optimizer_hash,
    optimizer_names,
    plain_name,
    read_adamw_state,
    read_state,
    square_norm,
    sum_of_squares,
    value_ranges,
)
from gradscope.policy.adapters import asked_by_peft, find_whole
from gradscope.policy.attention import packing_allowed, without_cudnn_attention, without_packing
from gradscope.policy.autocast import without_autocast
from gradscope.policy.checkpoint import (
    ADAPTER_CONFIG,
    EMBEDDED,
    checkpoint_name,
    checkpoint_step,
    find_checkpoint,
    hash_ahead,
    list_step_folders,
    model_of_step,
    policy_hashes,
    refuse_training_run,
    shards_of,
    weights_hash,
)
from gradscope.policy.dequantizing import refuse_unreadable, unpacked
from gradscope.policy.identity import make_key, make_manifest
from gradscope.policy.launch import join_launch
from gradscope.policy.layers import largest_setting, layer_settings
from gradscope.policy.loading import (
    DTYPES,
    GRADIENT_SHARE,
    PolicyLike,
    find_device,
    find_lossy_text,
    free_memory,
    gradient_budget,
    load_policy,
    load_tokenizer,
    outline_policy,
    return_freed_memory,
)
from gradscope.policy.module_groups import group_names, module_groups
from gradscope.policy.naming import named_step
from gradscope.policy.parameters import (
    PART,
    flat_slices,
    float_parameters,
    is_subset,
    merged_parameters,
    model_bytes,
    trained_only,
    weights_version,
)
from gradscope.policy.policy import Policy, check_prompt, find_blocks, takes
from gradscope.policy.positions import find_context
from gradscope.policy.rewind import restoring
from gradscope.policy.saving import is_last_checkpoint, missing_part
from gradscope.policy.shrinking import make_small_model
from gradscope.policy.upcasting import (
    UPCAST,
    arithmetic_dtype,
    is_upcast,
    moving,
    precision_in_words,
    replaced_forward,
    upcast_on_use,
)
from gradscope.policy.whole_weights import refuse_shards, whole_weights

__all__ = [
    "ADAPTER_CONFIG", "DTYPES", "EMBEDDED", "GRADIENT_SHARE", "PART", "RATE", "UPCAST", "AdamWSettings", "AdamWState",
    "Policy", "PolicyLike", "arithmetic_dtype", "asked_by_peft", "check_prompt", "checkpoint_name", "checkpoint_step",
    "find_blocks", "find_checkpoint", "find_context", "find_device", "find_lossy_text", "find_optimizer_file",
    "find_policy_state", "find_whole", "flat_slices", "float_parameters", "free_memory", "gradient_budget",
    "group_names", "group_settings", "hash_ahead", "is_last_checkpoint", "is_subset", "is_upcast", "join_launch",
    "largest_setting", "layer_settings", "list_step_folders", "load_policy", "load_tokenizer", "make_key",
    "make_manifest", "make_small_model", "merged_parameters", "missing_part", "model_bytes", "model_of_step",
    "module_groups", "moving", "named_step", "optimizer_hash", "optimizer_names", "outline_policy", "packing_allowed",
    "plain_name", "policy_hashes", "precision_in_words", "read_adamw_state", "read_state", "refuse_shards",
    "refuse_training_run", "refuse_unreadable", "replaced_forward", "restoring", "return_freed_memory", "shards_of",
    "square_norm", "sum_of_squares", "takes", "trained_only", "unpacked", "upcast_on_use", "value_ranges",
    "weights_hash", "weights_version", "whole_weights", "without_autocast", "without_cudnn_attention",
    "without_packing",
]  # fmt: skip
