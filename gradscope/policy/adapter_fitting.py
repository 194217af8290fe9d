"""Matching an adapter to its base: names from another class of the same model, another vocabulary size."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from gradscope.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of the tensors in an adapter's file, by name in the model (without peft's base_model.model.)."""

TOWER = re.compile(r"(^|[._])(visual|vision|image|audio|video|speech|multi_modal|multimodal|mm)([._]|$)")
"""Name parts of vision and audio modules, which a model loaded for text only does not have."""
OF_LORA = re.compile(r"(\.base_layer)*\.lora_\w+(\.|$)")
OF_A_WRAPPER = re.compile(r"\.(modules_to_save|original_module|base_layer|token_adapter)\b.*")
WHOLE = ("", ".base_layer", ".modules_to_save", ".token_adapter.base_layer")
"""Where peft stores a whole embedding: unchanged, below a LoRA, fully trained, or below trainable tokens."""


@dataclass(frozen=True)
class NameFit:
    """Mapping from an adapter's names to those of the loaded base."""

    prefixes: dict[str, str] = field(default_factory=dict)
    """Prefix in the adapter → prefix in the base; empty if the names agree."""
    left_out: frozenset[str] = frozenset()
    """Vision and audio tensors that a text-only model does not have."""

    def rename(self, name: str) -> str:
        """Translate an adapter's name into the base's.

        >>> NameFit({"model.language_model": "model"}).rename("model.language_model.layers.0.mlp.up_proj")
        'model.layers.0.mlp.up_proj'
        """
        for pattern, replacement in self.patterns.items():
            name, found = re.subn(pattern, replacement, name)
            if found:
                break
        return name

    @property
    def patterns(self) -> dict[str, str]:
        """Return the prefixes as peft's key_mapping."""
        longest_first = sorted(self.prefixes.items(), key=lambda pair: -len(pair[0]))
        return {rf"^{re.escape(old)}\.": f"{new}." if new else "" for old, new in longest_first}


def fit_names(model: nn.Module, shapes: Shapes) -> NameFit:
    """Match an adapter's names to the loaded model's class.

    Image-text classes have the text model below `language_model`, whose place depends on the version of transformers;
    text-only classes have no such part. Names that differ only in this refer to the same module.
    """
    modules = {name for name, _ in model.named_modules()}
    places: dict[str, list[str]] = {}
    for name in modules:
        places.setdefault(_core(name), []).append(name)
    strange = {module for name in shapes if (module := module_of(name)) not in modules}
    prefixes = {}
    for name in sorted(strange):
        if len(here := places.get(_core(name), ())) == 1:
            old, new = name.split("."), here[0].split(".")
            while old and new and old[-1] == new[-1]:
                old.pop(), new.pop()
            if old:
                prefixes[".".join(old)] = ".".join(new)
    fit = NameFit(prefixes)
    unknown = {name: fit.rename(module_of(name)) for name in shapes}
    left_out = [name for name, module in unknown.items() if module not in modules and TOWER.search(module)]
    return NameFit(prefixes, frozenset(left_out))


def fit_config(model: nn.Module, config: Any, shapes: Shapes, fit: NameFit) -> Any:
    """Return peft's LoraConfig with the base's names, for the saved tensors.

    Configurations may contain regular expressions over the other class's names, so the modules are listed explicitly,
    each with its rank and alpha.
    """
    modules = {name for name, _ in model.named_modules()}
    adapted = {}
    for name in shapes:
        old = module_of(name)
        if OF_LORA.search(name) and (new := fit.rename(old)) in modules:
            adapted[new] = old
    # Parameters that are adapted as such, or else modules.
    parts = [name.rpartition(".")[::2] for name in config.target_parameters or ()]
    parameters = {(new, part) for new, old in adapted.items() for held, part in parts if f".{old}".endswith(f".{held}")}
    config.target_modules = adapted.keys() - {new for new, _ in parameters}
    config.target_parameters = [".".join(pair) for pair in sorted(parameters)] or None
    config.exclude_modules = config.layers_to_transform = config.layers_pattern = None
    for pattern in ("rank_pattern", "alpha_pattern"):
        given = getattr(config, pattern) or {}
        own = {}
        for new, old in adapted.items():  # The first match counts, as in peft.
            if key := next((key for key in given if re.match(rf"(.*\.)?({key})$", old)), None):
                own[re.escape(new)] = given[key]
        setattr(config, pattern, own)
    known = [f".{name}" for name in modules]
    if config.modules_to_save:
        renamed = [fit.rename(f"{name}.").rstrip(".") for name in config.modules_to_save]
        kept = [name for name in renamed if any(place.endswith(f".{name}") for place in known)]
        config.modules_to_save = kept or None
    if isinstance(config.trainable_token_indices, dict):
        tokens = config.trainable_token_indices
        config.trainable_token_indices = {fit.rename(f"{name}.").rstrip("."): ids for name, ids in tokens.items()}
    return config


def fit_vocabulary(model: PreTrainedModel, folder: Path, shapes: Shapes, trained: Any) -> None:
    """Resize the model's vocabulary to the adapter's if the adapter holds whole embedding tables.

    shapes: by names in this model. trained: `trainable_token_indices` in the configuration. Raises InputError if it
    does not hold them, since new rows would be random.
    """
    ends = {"embedding": model.get_input_embeddings(), "head": model.get_output_embeddings()}
    tables = {end: name for end, module in ends.items() for name, other in model.named_modules() if other is module}
    places = [(name, 0) for table in tables.values() for name in _whole(table)]
    places += [(f"{tables['embedding']}.lora_embedding_A", 1), (f"{tables.get('head')}.lora_B.weight", 0)]
    rows = {shapes[name][axis] for name, axis in places if len(shapes.get(name, ())) == 2}
    have = len(ends["embedding"].weight)
    lists = trained.values() if isinstance(trained, Mapping) else [trained or ()]
    last = max((token for tokens in lists for token in tokens if isinstance(token, int)), default=0)
    if not rows and last >= have:
        raise InputError(
            f"{folder} trained the token {last}, its base has {have} tokens, and the adapter holds no whole embedding "
            "table; give the resized base (--base), or a merged model"
        )
    if not rows - {have}:
        return
    if len(rows) > 1:
        raise InputError(
            f"{folder} holds tables of {' and '.join(map(str, sorted(rows)))} tokens; save the adapter anew from one "
            "model"
        )
    tied = ends["head"] is not None and ends["head"].weight is ends["embedding"].weight
    saved = {table: any(name in shapes for name in _whole(table)) for table in tables.values()}
    if not (any(saved.values()) if tied else all(saved.values())):
        lost = next(table for table, is_saved in saved.items() if not is_saved)
        raise InputError(
            f"{folder} was trained with {min(rows)} tokens, its base has {have}, and the adapter lacks the rows of "
            f"{lost}, which would be random; give the resized base (--base), or a merged model"
        )
    model.resize_token_embeddings(min(rows), mean_resizing=False)


def module_of(name: str) -> str:
    """Return the name of the module that an adapter's tensor belongs to.

    >>> module_of("model.layers.0.mlp.up_proj.lora_A.weight"), module_of("lm_head.modules_to_save.weight")
    ('model.layers.0.mlp.up_proj', 'lm_head')
    >>> module_of("model.norm.weight"), module_of("model.embed_tokens.lora_embedding_A")
    ('model.norm', 'model.embed_tokens')
    """
    if found := OF_LORA.search(name) or OF_A_WRAPPER.search(name):
        return name[: found.start()]
    return name.rpartition(".")[0]


def _whole(table: str) -> list[str]:
    return [f"{table}{part}.weight" for part in WHOLE]


def _core(name: str) -> str:
    """Strip the parts of a name that differ between classes of the same model."""
    return ".".join(part for part in name.split(".") if part not in ("model", "language_model", "text_model"))
