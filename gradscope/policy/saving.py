"""Checkpoints that are being written: which parts are missing, and whether one is the run's last."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

from safetensors import SafetensorError, safe_open

from gradscope.errors import InputError
from gradscope.policy.checkpoint import ADAPTER_CONFIG, ADAPTER_WEIGHTS, STATE, adapter_weights, model_of_step
from gradscope.runs import read_json

TORCH = (".pt", ".pth", ".bin")
"""Suffixes of torch.save files; since torch 1.6, these are zip archives."""
ZIP = b"PK\x03\x04"
_ONE_OF = re.compile(r"(.+)-\d+-of-\d+(\.safetensors|\.bin)")
DESCRIPTIONS = ("config.json", ADAPTER_CONFIG, STATE)


def missing_part(folder: Path) -> str | None:
    """Return which part of a checkpoint is missing, judging by its files; None if it is complete.

    Uses the lengths stated in safetensors and torch archives, the shards listed in an index, and the order in which
    transformers and torch.distributed.checkpoint write. Anything else counts as complete.
    """
    try:
        model = model_of_step(folder)
    except InputError as error:  # shards of some ranks are missing
        return error.reason
    if model is None:
        return "weights"
    if (model / ADAPTER_CONFIG).is_file() and adapter_weights(model) is None:
        return ADAPTER_WEIGHTS[0]
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    if (cut := next(filter(None, map(_what_is_cut, files)), None)) is not None:
        return cut
    # transformers' Trainer saves model and arguments first, then the optimizer, and its state last.
    if (folder / "training_args.bin").is_file() and not (folder / STATE).is_file():
        return STATE
    return None


def _what_is_cut(file: Path) -> str | None:
    """Return what is missing of a file, or next to it; None if it is complete or cannot be judged."""
    if file.name in DESCRIPTIONS or file.name.endswith(".index.json"):
        if not (content := read_json(file)):
            return f"the end of {file.name}"
        shards = content.get("weight_map", {})
        named = sorted({*shards.values()}) if isinstance(shards, dict) else []
        return next((name for name in named if not (file.parent / str(name)).is_file()), None)
    if file.suffix == ".distcp" and not (file.parent / ".metadata").is_file():
        return ".metadata"  # written last
    if file.suffix not in (".safetensors", *TORCH):
        return None
    if part := _ONE_OF.fullmatch(file.name):  # save_pretrained writes the index after the shards
        index = f"{part[1]}{part[2]}.index.json"
        if not (file.parent / index).is_file():
            return index
    return None if file.stat().st_size and _is_whole(file) else f"the end of {file.name}"


def _is_whole(file: Path) -> bool:
    """Return whether a safetensors file or an archive is complete; True for files of another kind."""
    if file.suffix == ".safetensors":
        try:
            with safe_open(file, "pt"):
                return True
        except SafetensorError:  # of a length that its header does not say
            return False
    with file.open("rb") as handle:
        return handle.read(len(ZIP)) != ZIP or zipfile.is_zipfile(handle)


def is_last_checkpoint(folder: Path) -> bool:
    """Return whether the state saved by transformers, TRL or gradscope marks the run's last checkpoint."""
    state = read_json(folder / STATE) or {}
    step, last = state.get("global_step", state.get("step")), state.get("max_steps")
    return isinstance(step, int) and isinstance(last, int) and 0 < last <= step
