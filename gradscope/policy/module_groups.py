"""Which part of a decoder a parameter belongs to, by its name: its layer, and what it does there."""

from __future__ import annotations

import re

from torch import nn

from gradscope.policy.parameters import float_parameters
from gradscope.policy.policy import Policy

_ADAPTER = re.compile(r"\.lora_(?:embedding_)?(\w+)")
_NORM = re.compile(r"norm|(?:^|\.)ln_")
_ATTENTION = re.compile(r"att(?:n|ention)")
_INSIDE_ATTENTION = {
    r"qkv|query_key_value|c_attn|w_pack": "attention q, k, v",
    r"kv_": "attention k, v",
    r"q_|query|wq\b": "attention q",
    r"k_|key|wk\b": "attention k",
    r"v_|value|wv\b": "attention v",
    r"o_|out|c_proj|dense|wo\b": "attention o",
}
_MLP = re.compile(r"mlp|feed_forward|ffn|expert|moe|fc\d")


def module_groups(policy: Policy) -> dict[str, tuple[int | None, str]]:
    """Return each measured parameter's layer (None: outside the blocks) and its group of `group_names`, by name."""
    inside, found = policy.blocks_name + ".", {}
    for name, group in group_names(policy.model).items():
        number = name.removeprefix(inside).partition(".")[0] if name.startswith(inside) else ""
        found[name] = int(number) if number else None, group
    return found


def group_names(model: nn.Module) -> dict[str, str]:
    """Return the group of each measured parameter of a transformers model, by name.

    Groups: embedding, or embedding and head where they are one; attention q, k, v, o (or k, v or q, k, v in one
    matrix), MLP, norms, head; adapter A and B; other.
    """
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    names = {id(p): "embedding" for p in ends[0].parameters()}
    for parameter in () if ends[1] is None else ends[1].parameters():
        names[id(parameter)] = "embedding and head" if id(parameter) in names else "head"
    return {name: names.get(id(parameter)) or _group(name) for name, parameter in float_parameters(model)}


def _group(name: str) -> str:
    """Return the group of a parameter that is no embedding's or head's.

    >>> _group("self_attn.q_proj.lora_B.default.weight"), _group("attn.c_attn.bias"), _group("self_attn.k_norm.weight")
    ('adapter B', 'attention q, k, v', 'norms')
    """
    if adapter := _ADAPTER.search(name):
        return f"adapter {adapter[1]}"
    if _NORM.search(name):
        return "norms"
    if _ATTENTION.search(name):
        leaf = name.rsplit(".", 2)[-2].lower()
        return next((group for told, group in _INSIDE_ATTENTION.items() if re.match(told, leaf)), "attention")
    return "MLP" if _MLP.search(name) else "embedding" if "emb" in name or "wpe" in name else "other"
