"""Reading weights and AdamW's moments of a sharded checkpoint from any supported writer."""

from __future__ import annotations

from collections.abc import Container
from functools import lru_cache
from typing import Any

from torch import Tensor

from gradscope.errors import InputError
from gradscope.policy.sharded.layouts import Shards
from gradscope.runs import read_json


def read_weights(shards: Shards, expected: Container[str]) -> dict[str, Tensor]:
    """Return the model's weights by its own names. expected: the names according to the configuration.

    Raises InputError for a damaged or incomplete checkpoint, for pickles that would execute code, and for the names of
    another trainer's model, with the command that converts it.
    """
    _refuse_megatron(shards)
    found = _reader(shards).read_weights(shards, expected)
    if not found:
        raise InputError(
            f"{shards.folder} holds no weights with the names of config.json's model; give the right configuration "
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
    """Return the optimizer's state in the form of AdamW's `state_dict()`, with whole moments."""
    _refuse_megatron(shards)
    return _reader(shards).read_moments(shards)


@lru_cache(maxsize=8)
def has_moments(shards: Shards) -> bool:
    """Return whether the files include an optimizer's state, looking into torch.distributed.checkpoint's metadata."""
    if shards.kind != "dcp":
        return True
    if _is_megatron(shards):
        return False
    try:
        return _reader(shards).has_moments(shards)
    except InputError:
        return True  # a damaged one is refused when it is read


def _is_megatron(shards: Shards) -> bool:
    """Return whether Megatron saved the checkpoint (torch_dist), with its own names and fused tensors."""
    said = read_json(shards.folder / "metadata.json") or {}
    return shards.kind == "dcp" and ((shards.folder / "common.pt").is_file() or "sharded_backend" in said)


def _refuse_megatron(shards: Shards) -> None:
    """Raise InputError for a Megatron checkpoint, with the command that converts it."""
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
    raise InputError(f"{folder} is a Megatron checkpoint, with other names and fused layers; convert it with {command}")


def _reader(shards: Shards) -> Any:
    if shards.kind == "dcp":
        from gradscope.policy.sharded import dcp as reader
    elif shards.kind == "ranks":
        from gradscope.policy.sharded import ranks as reader
    else:
        from gradscope.policy.sharded import zero as reader
    return reader
