"""A loaded checkpoint or adapter, its tokenizer and blocks, and its saved optimizer."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "adamw": [
            "AdamWState",
            "PART",
            "find_optimizer_file",
            "find_policy_state",
            "read_adamw_state",
            "read_optimizer_file",
            "square_norm",
            "value_range",
        ],
        "adapters": ["find_whole"],
        "checkpoint": [
            "ADAPTER_CONFIG",
            "checkpoint_step",
            "fetch_policy",
            "hash_ahead",
            "policy_hashes",
            "refuse_training_run",
            "weights_hash",
        ],
        "launch": ["join_launch"],
        "loading": [
            "BROKEN_FILE",
            "DTYPES",
            "EMBEDDED",
            "GRADIENT_SHARE",
            "find_device",
            "free_memory",
            "gradient_budget",
            "load_policy",
            "load_tokenizer",
            "return_freed_memory",
        ],
        "parameters": ["flat_slices", "flat_spans", "float_parameters", "is_subset", "model_bytes"],
        "policy": ["Policy", "check_prompt", "find_blocks", "takes"],
        "rewind": ["rewound"],
        "upcasting": [
            "UPCAST",
            "arithmetic_dtype",
            "is_upcast",
            "moving",
            "precision_in_words",
            "replaced_forward",
            "upcast_on_use",
        ],
    },
)
