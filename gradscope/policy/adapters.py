"""peft LoRA adapters as checkpoints: finding the base model, attaching or merging the adapter."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gradscope.errors import InputError, first_line, show
from gradscope.policy.adapter_fitting import fit_config, fit_names, fit_vocabulary, module_of
from gradscope.policy.checkpoint import (
    ADAPTER_CONFIG,
    EMBEDDED,
    adapter_weights,
    cached_snapshot,
    configuration_home,
    is_adapter,
    is_hub_name,
    shards_of,
)
from gradscope.runs import load_tensors, parse_json_file, read_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MISFITS = (OSError, ValueError, RuntimeError, LookupError, TypeError, AttributeError, ImportError, re.error)
"""Errors that peft raises if an adapter and a model differ in layers, shapes or settings."""
KEY = "base_model_name_or_path"
UNMERGEABLE = ("PREFIX_TUNING", "PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "CPT", "CARTRIDGE")
UNMERGEABLE += ("ADAPTION_PROMPT", "XLORA", "POLY")
"""Kinds of peft that add trained prompts, or choose between adapters per token, and cannot be merged."""
OTHER_TASKS = ("SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS")
"""peft's tasks of adapters with a head of their own, such as a reward model's or a critic's."""
INVOKED = "alora_invocation_tokens"
"""Setting of a LoRA that peft's own forward pass switches on at these tokens (aLoRA)."""
PREFIX = "base_model.model."
"""Prefix that peft adds to the names of an adapted model's tensors."""
WRAPPED = re.compile(r"\b_(fsdp_wrapped_module|orig_mod|checkpoint_wrapped_module)\b|\.lora_\w+\.(?!weight$|bias$)")
"""Parts of names that a wrapper, or peft itself in memory (lora_A.default.weight), adds."""
CAUSAL = ("ForCausalLM", "ForConditionalGeneration", "ForImageTextToText")
"""Suffixes of the names of classes with a language-model head."""


@contextmanager
def asked_by_peft() -> Iterator[None]:
    """Leave out the warning that transformers 5.24 gives when peft asks for a property by its former name."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
        yield


def find_base(folder: Path, base: str | Path | None = None) -> Path:
    """Return the folder of an adapter's base model: `base`, or else the one named in adapter_config.json.

    A relative path is resolved from the adapter's folder, then from the current one; other names are looked up in the
    local cache of the model hub. Raises InputError if the model is not found.
    """
    config = read_adapter_config(folder)
    name = str(config.get(KEY) or "") if base is None else str(base)
    if not name:
        raise InputError(f"{folder / ADAPTER_CONFIG} names no base model ({KEY}); give its folder with --base")
    if (place := _find_here(folder if base is None else None, name)) is not None:
        if base is not None:
            _check_family(folder, config, place)
        return place
    cached = cached_snapshot(name, config.get("revision") if base is None else None) if is_hub_name(name) else None
    if cached is not None:
        return Path(cached)
    whose = "the requested base model" if base is not None else "the adapter's base model"
    raise InputError(
        f"{folder}: {whose}, {name}, is not a local folder and not in the cache of the model hub; give its folder with "
        "--base (nothing is downloaded)"
    )


def _find_here(folder: Path | None, name: str) -> Path | None:
    """Find a folder by name: relative to `folder` or the current folder, or bundled with gradscope."""
    places = [*([] if folder is None else [folder / name]), Path(EMBEDDED.get(name, name))]
    return next((place for place in places if os.path.isdir(place)), None)  # of a name that is too long, Path raises


def _check_family(folder: Path, config: dict[str, Any], base: Path) -> None:
    """Raise InputError if the base's family differs from that of adapter_config.json's base, if found."""
    named = _find_here(folder, str(config.get(KEY) or ""))
    if named is None:
        return
    families = [(read_json(place / "config.json") or {}).get("model_type") for place in (named, base)]
    if None not in families and families[0] != families[1]:
        raise InputError(
            f"{folder} was trained on {named}, a {show(families[0])}, but {base} is a {show(families[1])}; give the "
            "right base with --base, or leave it out"
        )


def find_bases(folder: Path, base: str | Path | None = None) -> list[Path]:
    """Return the folders that an adapter builds on, outermost first: other adapters, and finally the whole model.

    base: of the adapter itself, as in `find_base`. Raises InputError for circular references.
    """
    found = [find_base(folder, base)]
    while is_adapter(found[-1]):
        if os.path.realpath(found[-1]) in [os.path.realpath(place) for place in (folder, *found[:-1])]:
            raise InputError(
                f"{folder}: {KEY} leads from adapter to adapter and back to {found[-1]}; give the whole model with "
                "--base"
            )
        found.append(find_base(found[-1]))
    return found


def find_whole(model: str, base: str | None = None) -> str:
    """Return the folder that determines the model: this one, its adapter's base, or the shards' configuration."""
    folder = Path(model)
    if is_adapter(folder):
        return str(find_bases(folder, base)[-1])
    shards = shards_of(folder)
    return model if shards is None else str(configuration_home(folder, shards, base))


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """Read a LoRA's adapter_config.json. Raises InputError for other kinds, saying if they can be merged."""
    try:
        config = parse_json_file(folder / ADAPTER_CONFIG)
        kind = config.get("peft_type")
    except (OSError, ValueError, AttributeError) as error:
        raise InputError(
            f"{folder / ADAPTER_CONFIG} cannot be read ({first_line(error)}); save the adapter there anew"
        ) from error
    if (task := config.get("task_type")) in OTHER_TASKS:
        raise InputError(f"{folder} was trained for {task}, not to continue text; give a policy's adapter")
    if kind == "LORA" and config.get(INVOKED):
        raise InputError(
            f"{folder} is an aLoRA ({INVOKED}), which acts only after these tokens and can be neither merged nor "
            "measured; give a LoRA that acts on every token, or a whole model"
        )
    if kind == "LORA":
        return config
    if str(kind) in UNMERGEABLE:
        advice = "which cannot be merged into the weights; give a LoRA or a whole model"
    else:
        advice = "but only LORA is supported; merge it into its base (peft's merge_and_unload) and give that folder"
    raise InputError(f"{folder} is an adapter of kind {kind!r}, {advice}")


def attach_adapter(
    model: PreTrainedModel, folder: Path, *, merge: bool
) -> tuple[PreTrainedModel, frozenset[str] | None]:
    """Return the model with its adapter, and the names of the adapter's parameters (None if it was
    merged).

    A separate adapter gets the model's precision, but at least float32, as peft trains it. The model gets the adapter's
    vocabulary size; a text-only model gets the text part of an image-text adapter. Raises InputError without peft, or
    if the adapter does not fit the model, layer by layer.
    """
    from safetensors import SafetensorError

    try:
        from peft import PeftConfig, PeftModel
    except ImportError as error:
        raise InputError(f"{folder} is an adapter, which needs peft: pip install 'gradscope[lora]'") from error
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    try:
        shapes = _check_base(model, folder)
        fit = fit_names(model, shapes)
        renaming = {}
        if fit.prefixes or fit.left_out:
            config = fit_config(model, PeftConfig.from_pretrained(str(folder)), shapes, fit)
            renaming = {"config": config, "key_mapping": fit.patterns}
        shapes = {fit.rename(name): shape for name, shape in shapes.items() if name not in fit.left_out}
        fit_vocabulary(model, folder, shapes, read_adapter_config(folder).get("trainable_token_indices"))
        with asked_by_peft():
            warnings.filterwarnings("ignore", message="Found missing adapter keys")  # they are an error below
            warnings.filterwarnings("ignore", message="`lora_bias=True` was passed")  # where it will be merged
            adapted = PeftModel.from_pretrained(model, str(folder), is_trainable=not merge, **renaming)
        _check_keys(adapted, folder, {PREFIX + name for name in shapes})
    except InputError:
        raise
    except (*MISFITS, SafetensorError) as error:
        raise InputError(
            f"{folder} does not fit its base model ({first_line(error)}); give the right base with --base"
        ) from error
    wanted = _check_forward(adapted, folder)
    if merge:
        return _merge(adapted, folder, wanted), None
    inner = adapted.get_base_model()
    trained = {name: p for name, p in inner.named_parameters() if p.requires_grad}
    for parameter in trained.values():
        parameter.data = parameter.data.to(torch.promote_types(model.dtype, torch.float32))
    if broken := next((name for name, p in trained.items() if not p.isfinite().all()), None):
        raise InputError(f"{folder}: the weight {broken} is not finite (NaN or infinity); give another checkpoint")
    return inner, frozenset(trained)


def _check_base(model: PreTrainedModel, folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the adapter's tensors, by their names without peft's prefix.

    Raises InputError if adapter_config.json names another class of base model, or a rank that is not in the file. The
    class is recorded for adapters made without a task; peft ignores it, but many model families have layers of the same
    names and shapes.
    """
    from safetensors import safe_open

    config = read_adapter_config(folder)
    recorded = config.get("auto_mapping") or {}
    kind = recorded.get("base_model_class") if isinstance(recorded, dict) else recorded
    kind = None if kind is None else str(kind).removeprefix("FSDP")  # prefix of sharded models
    if kind is not None and _family(kind) != _family(type(model).__name__):
        raise InputError(
            f"{folder} was trained on a {show(kind)}, its base here is a {type(model).__name__}; give the right base "
            "with --base"
        )
    pattern = config.get("rank_pattern") or {}
    ranks = [config.get("r"), *(pattern.values() if isinstance(pattern, dict) else [pattern])]
    path = adapter_weights(folder)
    if path.suffix == ".bin":
        tensors = load_tensors(path, mapped=True)
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    else:
        with safe_open(path, "pt") as file:
            names = file.keys()
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in names}
    if empty := next((name for name, shape in shapes.items() if 0 in shape), None):
        raise InputError(
            f"{path}: {empty} is empty, as when a trainer saves without gathering the "
            "shards of its weights (DeepSpeed ZeRO-3, FSDP); gather the weights and save the adapter again"
        )
    largest = max((size for shape in shapes.values() for size in shape), default=0)
    if wrong := [rank for rank in ranks if not (isinstance(rank, int) and 0 < rank <= largest)]:
        raise InputError(
            f"{folder} does not fit its base model: {ADAPTER_CONFIG} names the rank {show(wrong[0])}, but no saved "
            f"tensor is larger than {largest}; save both together"
        )
    if bare := next((name for name in shapes if "lora_" in name and not name.startswith(PREFIX)), None):
        raise InputError(
            f"{path} has {bare}, but peft's names begin with {PREFIX}; save the adapter again "
            "with peft's save_pretrained"
        )
    return {name.removeprefix(PREFIX): shape for name, shape in shapes.items()}


def _family(kind: str) -> str:
    """Strip the parts of a class name that differ between image-text and text-only classes of a model.

    >>> _family("Gemma3ForConditionalGeneration") == _family("Gemma3ForCausalLM")
    True
    >>> _family("LlamaForSequenceClassification") == _family("LlamaForCausalLM")
    False
    """
    return re.sub(f"({'|'.join(CAUSAL)})$", "", kind)


@torch.no_grad()
def _check_forward(adapted: Any, folder: Path) -> Tensor:
    """Return logits on a few ids. Raises InputError if the adapted model does not run, or not as peft runs it."""
    model, ids = adapted.eval().get_base_model(), _sentence(adapted, folder)
    try:
        found, wanted = (m(input_ids=ids, use_cache=False).logits.double() for m in (model, adapted))
    except MISFITS as error:  # replicated layers in a model whose configuration lists its layers
        raise InputError(
            f"{folder}: the model with this adapter does not run ({type(error).__name__}: "
            f"{first_line(error)}); give another checkpoint"
        ) from error
    if not _are_close(found, wanted, model.dtype):
        raise InputError(
            f"{folder} computes other logits in peft's own forward pass than by the layers that it adapts, so it can "
            "be neither merged nor measured; give a plain LoRA, or a whole model"
        )
    return found


def _sentence(adapted: Any, folder: Path) -> Tensor:
    """Return a few ids [1, n], with those that adapter_config.json names: some adapters act on them alone."""
    named = [value for name, value in read_adapter_config(folder).items() if "token" in name]
    named = [token for value in named if isinstance(value, list) for token in value if isinstance(token, int)]
    ids = torch.tensor([[*range(8), *named[:64], *range(8)]], device=adapted.device)
    return ids % adapted.config.get_text_config().vocab_size


def _are_close(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> bool:
    tolerance = 1e-3 if dtype in (torch.float32, torch.float64) else 0.1
    return bool((found - wanted).norm() <= tolerance * wanted.norm())


@torch.no_grad()
def _merge(adapted: Any, folder: Path, wanted: Tensor) -> PreTrainedModel:
    """Merge the adapter into the model's weights. Raises InputError if the merged model's logits differ."""
    advice = "give --params adapter"
    if read_adapter_config(folder).get("layer_replication"):
        raise InputError(
            f"{folder} cannot be merged: its replicated layers (layer_replication) share the base's weights; {advice}"
        )
    try:
        merged = adapted.merge_and_unload()
    except MISFITS as error:  # biases (lora_bias) that the base does not have
        raise InputError(f"{folder} cannot be merged: {first_line(error)}; {advice}") from error
    found = merged(input_ids=_sentence(merged, folder), use_cache=False).logits.double()
    if not _are_close(found, wanted, merged.dtype):
        raise InputError(
            f"{folder} cannot be merged: the merged model's logits differ, perhaps because an adapted embedding is "
            f"tied to the head; {advice}"
        )
    for parameter in merged.parameters():
        parameter.requires_grad_(True)
    return merged


def _check_keys(adapted: nn.Module, folder: Path, saved: set[str]) -> None:
    """Raise InputError unless file (`saved`) and model have the same tensors; peft at most warns."""
    from peft import get_peft_model_state_dict

    file, modules = adapter_weights(folder), {name for name, _ in adapted.named_modules()}
    with warnings.catch_warnings():
        # peft mistakes the vectors of lora_bias for ungathered shards.
        warnings.filterwarnings("ignore", "Adapter .* invalid shape")
        wanted = set(get_peft_model_state_dict(adapted, save_embedding_layers=False))
    # peft also saves whole embeddings if these are adapted or resized.
    extra = sorted(name for name in saved - wanted if "lora_" in name)
    if wrapped := next(filter(WRAPPED.search, extra), None):
        raise InputError(
            f"{file} has {wrapped}, a wrapper's name (FSDP, torch.compile) or one in memory; save the adapter again, "
            "unwrapped, with peft's save_pretrained"
        )
    if foreign := next((name for name in extra if module_of(name) not in modules), None):
        raise InputError(
            f"{file} has {foreign}, for which the base has no layer; give the base it was trained on with --base"
        )
    if extra:
        raise InputError(f"{file} has {extra[0]}, which its configuration does not; save both together")
    if lost := sorted(wanted - saved):
        raise InputError(
            f"{file} lacks {lost[0]}, which its configuration names; save both together, or give the base it was "
            "trained on with --base"
        )
