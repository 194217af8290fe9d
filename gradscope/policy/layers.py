"""What a model's configuration says of each layer, which may differ."""

from __future__ import annotations

from typing import Any

from torch import nn


def layer_settings(model: nn.Module, name: str) -> list[Any]:
    """Return a setting of the text model's configuration for each layer, or None where it has none.

    Configurations whose layers differ (transformers' per_layer_config) raise an error if asked for one value.
    """
    config = model.config.get_text_config()
    same = [config] * getattr(config, "num_hidden_layers", 1)
    layers = config.per_layer_config if getattr(config, "is_heterogeneous", False) else same
    return [getattr(layer, name, None) for layer in layers]


def largest_setting(model: nn.Module, name: str) -> int | None:
    """Return a setting of the configuration, in the layer where it is largest; None if no layer has it."""
    return max(filter(None, layer_settings(model, name)), default=None)
