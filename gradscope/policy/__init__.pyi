"""What is at the door: a file is loaded when one of its names is first used."""

from .adamw import (
    PART as PART,
    AdamWState as AdamWState,
    find_optimizer_file as find_optimizer_file,
    find_policy_state as find_policy_state,
    optimizer_hash as optimizer_hash,
    read_adamw_state as read_adamw_state,
    read_optimizer_file as read_optimizer_file,
    read_state as read_state,
    square_norm as square_norm,
    sum_of_squares as sum_of_squares,
    value_ranges as value_ranges,
)
from .adapters import find_whole as find_whole
from .attention import without_cudnn_attention as without_cudnn_attention
from .checkpoint import (
    ADAPTER_CONFIG as ADAPTER_CONFIG,
    EMBEDDED as EMBEDDED,
    checkpoint_name as checkpoint_name,
    checkpoint_step as checkpoint_step,
    find_checkpoint as find_checkpoint,
    hash_ahead as hash_ahead,
    policy_hashes as policy_hashes,
    refuse_training_run as refuse_training_run,
    shards_of as shards_of,
    weights_hash as weights_hash,
)
from .launch import join_launch as join_launch
from .loading import (
    DTYPES as DTYPES,
    GRADIENT_SHARE as GRADIENT_SHARE,
    PolicyLike as PolicyLike,
    find_device as find_device,
    free_memory as free_memory,
    gradient_budget as gradient_budget,
    load_policy as load_policy,
    load_tokenizer as load_tokenizer,
    lost_text as lost_text,
    return_freed_memory as return_freed_memory,
)
from .parameters import (
    flat_slices as flat_slices,
    flat_spans as flat_spans,
    float_parameters as float_parameters,
    is_subset as is_subset,
    model_bytes as model_bytes,
)
from .policy import (
    Policy as Policy,
    check_prompt as check_prompt,
    check_template_kwargs as check_template_kwargs,
    find_blocks as find_blocks,
    takes as takes,
)
from .positions import find_context as find_context
from .rewind import rewound as rewound
from .upcasting import (
    UPCAST as UPCAST,
    arithmetic_dtype as arithmetic_dtype,
    is_upcast as is_upcast,
    moving as moving,
    precision_in_words as precision_in_words,
    replaced_forward as replaced_forward,
    upcast_on_use as upcast_on_use,
)
