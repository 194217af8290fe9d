"""LoRA adapters of peft as checkpoints: find the base model, attach or merge the adapter."""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gradscope.errors import InputError, first_line, show
from gradscope.policy.checkpoint import ADAPTER_CONFIG, ADAPTER_WEIGHTS, EMBEDDED, is_adapter, is_hub_name
from gradscope.runs import parse_json_file, read_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MISFITS = (OSError, ValueError, RuntimeError, LookupError, TypeError, AttributeError, ImportError, re.error)
"""Errors that peft raises where an adapter and a model differ in layers, shapes or settings."""
KEY = "base_model_name_or_path"


def find_base(folder: Path, base: str | Path | None = None) -> Path:
    """The folder of an adapter's base model: the one given, else the one that adapter_config.json names.

    A relative name is looked for from the adapter's folder, then from the current one; any other name is one of the
    model hub, which serves if its cache here holds it. Raises InputError where there is no such model.
    """
    config = read_adapter_config(folder)
    name = str(config.get(KEY) or "") if base is None else str(base)
    if not name:
        raise InputError(f"{folder / ADAPTER_CONFIG} names no base model ({KEY}); give its folder with --base")
    if (place := _find_here(folder if base is None else None, name)) is not None:
        if base is not None:
            _check_family(folder, config, place)
        return place
    if (cached := _find_in_cache(name, config.get("revision") if base is None else None)) is not None:
        return cached
    whose = "the base model that is asked for" if base is not None else "the adapter's base model"
    raise InputError(
        f"{folder}: {whose}, {name}, is no folder here and not in the cache of the model hub; give its folder with "
        "--base (nothing is downloaded)"
    )


def _find_here(folder: Path | None, name: str) -> Path | None:
    """A folder of that name, in this folder, in the current one, or one that comes with gradscope."""
    places = [*([] if folder is None else [folder / name]), Path(EMBEDDED.get(name, name))]
    return next((place for place in places if os.path.isdir(place)), None)  # of a name that is too long, Path raises


def _check_family(folder: Path, config: dict[str, Any], base: Path) -> None:
    """InputError for a base of another family than the one that adapter_config.json names, where that is here."""
    named = _find_here(folder, str(config.get(KEY) or ""))
    if named is None:
        return
    families = [(read_json(place / "config.json") or {}).get("model_type") for place in (named, base)]
    if None not in families and families[0] != families[1]:
        raise InputError(
            f"{folder} was trained on {named}, a {show(families[0])}; {base} is a {show(families[1])}; give the right "
            "one with --base, or leave it out"
        )


def find_whole(model: str, base: str | None = None) -> str:
    """The folder of a whole model that has the shape of this checkpoint: itself, or the base of an adapter."""
    folder = Path(model)
    return str(find_base(folder, base)) if is_adapter(folder) else model


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """adapter_config.json of a LoRA; InputError for any other."""
    try:
        config = parse_json_file(folder / ADAPTER_CONFIG)
        kind = config.get("peft_type")
    except (OSError, ValueError, AttributeError) as error:
        raise InputError(
            f"{folder / ADAPTER_CONFIG} cannot be read ({first_line(error)}); save the adapter there anew"
        ) from error
    if kind != "LORA":
        raise InputError(f"{folder} is an adapter of kind {kind!r}; only LORA is known here; merge it into its base")
    return config


def attach_adapter(
    model: PreTrainedModel, folder: Path, *, merge: bool
) -> tuple[PreTrainedModel, frozenset[str] | None]:
    """(the model with the adapter in it, names of the parameters that the adapter trains; None if it was merged).

    Kept apart, the adapter is as wide as the model and float32 at least, as peft trains it. Raises InputError without
    peft, and for an adapter that does not fit the model, layer by layer.
    """
    from safetensors import SafetensorError

    try:
        from peft import PeftModel
    except ImportError as error:
        raise InputError(f"{folder} is an adapter, which needs peft: pip install 'gradscope[lora]'") from error
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    try:
        _check_base(model, folder)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Found missing adapter keys")  # They are an error below.
            adapted = PeftModel.from_pretrained(model, str(folder), is_trainable=not merge)
        _check_keys(adapted, folder)
    except InputError:
        raise
    except (*MISFITS, SafetensorError) as error:
        raise InputError(
            f"{folder} does not fit its base model ({first_line(error)}); give the right one with --base"
        ) from error
    if merge:
        return _merge(adapted, folder), None
    inner = adapted.get_base_model()
    trained = {name: p for name, p in inner.named_parameters() if p.requires_grad}
    _widen(trained.values(), torch.promote_types(model.dtype, torch.float32))
    if broken := next((name for name, p in trained.items() if not p.isfinite().all()), None):
        raise InputError(f"{folder}: the weight {broken} is not finite (NaN or infinity); give another checkpoint")
    return inner, frozenset(trained)


def _check_base(model: PreTrainedModel, folder: Path) -> None:
    """InputError where adapter_config.json says that another kind of model was adapted, or a rank that is not saved.

    The class of the base is there where the adapter was made without a task; peft does not look at it, and layers of
    the same names and shapes are in models of many families.
    """
    from safetensors import safe_open

    config = read_adapter_config(folder)
    recorded = config.get("auto_mapping") or {}
    kind = recorded.get("base_model_class") if isinstance(recorded, dict) else recorded
    if kind is not None and str(kind).removeprefix("FSDP") != type(model).__name__:  # the name of a sharded one
        raise InputError(
            f"{folder} was trained on a {show(kind)}, its base here is a {type(model).__name__}; give the right one "
            "with --base"
        )
    pattern = config.get("rank_pattern") or {}
    ranks = [config.get("r"), *(pattern.values() if isinstance(pattern, dict) else [pattern])]
    with safe_open(folder / ADAPTER_WEIGHTS, "pt") as file:
        names = file.keys()
        largest = max((size for name in names for size in file.get_slice(name).get_shape()), default=0)
    if wrong := [rank for rank in ranks if not (isinstance(rank, int) and 0 < rank <= largest)]:
        raise InputError(
            f"{folder} does not fit its base model: {ADAPTER_CONFIG} names the rank {show(wrong[0])}, and no tensor "
            f"beside it is larger than {largest}; save both together"
        )


@torch.no_grad()
def _merge(adapted: Any, folder: Path) -> PreTrainedModel:
    """The plain model with the adapter's part added to its weights. InputError where it computes something else."""
    model = adapted.get_base_model().eval()
    ids = torch.arange(8, device=model.device)[None] % model.config.get_text_config().vocab_size
    wanted = model(input_ids=ids, use_cache=False).logits.double()
    merged = adapted.merge_and_unload()
    found = merged(input_ids=ids, use_cache=False).logits.double()
    tolerance = 1e-3 if merged.dtype in (torch.float32, torch.float64) else 0.1
    if not (found - wanted).norm() <= tolerance * wanted.norm():
        raise InputError(
            f"{folder} cannot be merged: the merged model computes something else, as where an adapted embedding is "
            "the head too; give --params adapter"
        )
    for parameter in merged.parameters():
        parameter.requires_grad_(True)
    return merged


def _widen(parameters: Any, dtype: torch.dtype) -> None:
    for parameter in parameters:
        parameter.data = parameter.data.to(dtype)


def _check_keys(adapted: nn.Module, folder: Path) -> None:
    """InputError unless the file and the adapted model have the same tensors: peft only warns, or is silent."""
    from peft import get_peft_model_state_dict
    from safetensors import safe_open

    with safe_open(folder / ADAPTER_WEIGHTS, "pt") as file:
        saved = set(file.keys())
    wanted = set(get_peft_model_state_dict(adapted, save_embedding_layers=False))
    # peft saves whole embeddings beside an adapter of theirs, or of a grown vocabulary; a grown one does not fit here.
    spare = {name for name in saved - wanted if "lora_" not in name}
    for names, words in ((wanted - saved, "lacks"), (saved - wanted - spare, "has, unlike its configuration,")):
        if left := sorted(names):
            raise InputError(f"{folder / ADAPTER_WEIGHTS} {words} {left[0]}; give the base it was trained on: --base")


def _find_in_cache(name: str, revision: str | None) -> Path | None:
    """The folder of a model that was fetched from the hub before; None if there is none."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    if not is_hub_name(name):
        return None
    try:
        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except (OSError, ValueError, HFValidationError, HfHubHTTPError):
        return None
