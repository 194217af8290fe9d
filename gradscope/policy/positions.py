"""The context length of a model's positions: learned tables, and rotary embeddings with scaling."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

STRETCHED = ("linear", "dynamic")
"""Rotary scalings under which `max_position_embeddings` is the training length, to be multiplied."""


def find_context(model: PreTrainedModel) -> int | None:
    """Return the longest sequence that a model's positions allow; None: no known limit."""
    config, words = model.config.get_text_config(), model.get_input_embeddings()
    places = getattr(config, "max_position_embeddings", None)
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding) and m is not words]
    # RoBERTa and related models number positions from padding_idx + 1.
    lost = [m.padding_idx + 1 for m in tables if m.num_embeddings == places and m.padding_idx is not None]
    return places and max([places, *_scaled(config, places)]) - max(lost, default=0)


def find_steady_context(model: PreTrainedModel) -> int | None:
    """Return the longest sequence up to which rotary angles do not depend on the length; None: no limit.

    Beyond it, `dynamic` scaling changes the frequencies with every length, and `longrope` switches to others, so that a
    token's results would depend on the sequences in the same batch.
    """
    config = model.config.get_text_config()
    places, found = getattr(config, "max_position_embeddings", None), []
    for rope in _ropes(config):
        if _kind(rope) == "dynamic":
            found.append(places)
        elif _kind(rope) == "longrope" and rope.get("long_factor") != rope.get("short_factor"):
            found.append(_original(config, rope))
    return min((length for length in found if length), default=None)


def _scaled(config: Any, places: int) -> Iterator[int]:
    """Yield the reach of each rotary embedding after scaling. places: `max_position_embeddings`.

    YaRN multiplies the training length (`original_max_position_embeddings`, else `max_position_embeddings`);
    configurations put the product (DeepSeek, gpt-oss), the training length (Qwen2.5) or something else (Qwen3) into
    `max_position_embeddings`. For Llama 3, longrope and Gemma 3 (which scales only some layers) it is always the length
    after scaling.
    """
    by_layer = _by_layer(config)
    for rope in _ropes(config):
        factor, original = rope.get("factor"), rope.get("original_max_position_embeddings")
        if not isinstance(factor, int | float) or isinstance(factor, bool) or not factor > 1:
            continue
        if _kind(rope) == "yarn" or (_kind(rope) in STRETCHED and original):
            yield round(factor * (_original(config, rope) or places))
        elif _kind(rope) in STRETCHED and not by_layer:
            yield round(factor * places)


def _ropes(config: Any) -> list[Mapping[str, Any]]:
    """Return the parameters of each rotary embedding: one, or one per kind of layer."""
    found = _found(config)
    return [rope for rope in (found.values() if _by_layer(config) else [found]) if isinstance(rope, Mapping)]


def _by_layer(config: Any) -> bool:
    found = _found(config)
    return isinstance(found, Mapping) and any(isinstance(value, Mapping) for value in found.values())


def _found(config: Any) -> Any:
    return getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}


def _kind(rope: Mapping[str, Any]) -> str | None:
    return rope.get("rope_type", rope.get("type"))


def _original(config: Any, rope: Mapping[str, Any]) -> int | None:
    return rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
