"""Weights and AdamW's moments of a sharded checkpoint, whoever wrote it."""

from __future__ import annotations

from collections.abc import Container
from functools import lru_cache
from typing import Any

from torch import Tensor

from gradscope.errors import InputError
from gradscope.policy.sharded.layouts import Shards
from gradscope.runs import read_json


def read_weights(shards: Shards, expected: Container[str]) -> dict[str, Tensor]:
    """Return the model's weights by its own names. expected: the names that the configuration makes.

    Raises InputError for a damaged or unfinished checkpoint, for one whose pickles would run something, and for tensors
    that another trainer's model names, with the command that converts them.
    """
    _refuse_megatron(shards)
    found = _reader(shards).read_weights(shards, expected)
    if not found:
        raise InputError(
            f"{shards.folder} holds no weights under names that config.json makes; give the model's own configuration "
            "with --base, or convert torchtitan's own models with its `python "
            f"scripts/checkpoint_conversion/convert_to_hf.py {shards.folder} DIR --model_name NAME --model_flavor "
            "FLAVOR --hf_assets_path BASE`"
        )
    if adapted := next((name for name in found if ".lora_" in name), None):
        raise InputError(
            f"{shards.folder} holds a LoRA beside its base ({adapted}); give the folder of the adapter alone (verl: "
            "lora_adapter beside the shards), or save it with save_pretrained"
        )
    return found


def read_moments(shards: Shards) -> dict[str, Any]:
    """Return the optimizer's state as AdamW's `state_dict()` has it, each moment whole."""
    _refuse_megatron(shards)
    return _reader(shards).read_moments(shards)


@lru_cache(maxsize=8)
def has_moments(shards: Shards) -> bool:
    """Return whether an optimizer's state is among the files: of torch.distributed.checkpoint's, the contents tell."""
    if shards.kind != "dcp":
        return True
    if _is_megatron(shards):
        return False
    try:
        return _reader(shards).has_moments(shards)
    except InputError:
        return True  # what is damaged is refused where it is read


def _is_megatron(shards: Shards) -> bool:
    """Return whether Megatron saved it (torch_dist): its tensors have Megatron's names and are fused."""
    said = read_json(shards.folder / "metadata.json") or {}
    return shards.kind == "dcp" and ((shards.folder / "common.pt").is_file() or "sharded_backend" in said)


def _refuse_megatron(shards: Shards) -> None:
    """InputError, with the command that converts it, for a checkpoint of Megatron: its tensors are fused, renamed."""
    if not _is_megatron(shards):
        return
    folder = shards.folder
    if folder.name == "dist_ckpt":
        command = "verl's `python -m verl.model_merger merge --backend megatron --local_dir "
        command += f"{folder.parent} --target_dir DIR`"
    elif folder.parent.name == "weights":
        command = "NeMo-RL's `uv run --extra mcore python examples/converters/convert_megatron_to_hf.py --config "
        command += f"{folder.parents[2]}/config.yaml --megatron-ckpt-path {folder} --hf-ckpt-path DIR`"
    else:
        command = "your trainer's own converter, slime's is `python tools/convert_torch_dist_to_hf.py --input-dir "
        command += f"{folder} --output-dir DIR --origin-hf-dir BASE`"
    raise InputError(f"{folder} is Megatron's, whose layers have other names and are fused; convert it with {command}")


def _reader(shards: Shards) -> Any:
    if shards.kind == "dcp":
        from gradscope.policy.sharded import dcp as reader
    elif shards.kind == "ranks":
        from gradscope.policy.sharded import ranks as reader
    else:
        from gradscope.policy.sharded import zero as reader
    return reader
