"""Load a policy with its tokenizer, and name the blocks on its residual stream: one door to the files that know how."""

from gradscope.checkpoint_files import (
    checkpoint_step,
    configuration_hash,
    fetch_policy,
    hash_ahead,
    policy_hashes,
    weights_hash,
)
from gradscope.devices import DTYPES, find_device
from gradscope.loading import BROKEN_FILE, EMBEDDED, is_causal, load_policy
from gradscope.policy import Policy, check_prompt, find_blocks, takes
from gradscope.tokenization import load_tokenizer, round_trips

__all__ = [
    "BROKEN_FILE",
    "DTYPES",
    "EMBEDDED",
    "Policy",
    "check_prompt",
    "checkpoint_step",
    "configuration_hash",
    "fetch_policy",
    "find_blocks",
    "find_device",
    "hash_ahead",
    "is_causal",
    "load_policy",
    "load_tokenizer",
    "policy_hashes",
    "round_trips",
    "takes",
    "weights_hash",
]
