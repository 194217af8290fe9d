"""Shared helpers for reading shards: stripping prefixes of names, and AdamW's state as a `state_dict()`."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

from torch import Tensor

from gradscope.errors import InputError

VARIANTS = {
    "amsgrad": ("amsgrad", False),
    "maximize": ("maximize=True, an ascent", False),
    "nesterov": ("Nesterov's momentum", False),
    "bias_correction": ("moments without bias correction", True),
    "correct_bias": ("moments without bias correction", True),
    "adam_w_mode": ("decay inside the gradient", True),
}
"""Flag of a parameter group → what it makes of AdamW, and its value in AdamW. Other flags (foreach, fused, capturable,
differentiable) change only how the step is computed."""
GROUP_KEYS = ("lr", "betas", "eps", "weight_decay", "initial_lr", "decoupled_weight_decay", *VARIANTS)
"""Entries read from a parameter group; others may have any type and are irrelevant."""
_MOMENT = re.compile(r"(?P<prefix>(?:.*?\.)?)state\.(?P<name>.+)\.(?P<key>\w+)")
_GROUP = re.compile(rf"(?P<prefix>(?:.*?\.)?)param_groups\.(?P<name>.+)\.(?P<key>{'|'.join((*GROUP_KEYS, 'params'))})")


def matching_names(names: Iterable[str], expected: Container[str]) -> dict[str, str]:
    """Map names in the model to names in the checkpoint, using the prefix under which most names are found.

    `model.model.norm.weight` is the model's `model.norm.weight` in a dictionary called `model`. Empty if no name
    matches, except that an adapter's tensors keep their names.
    """
    names = list(names)
    counts: dict[str, int] = {}
    for name in names:
        for start in (0, *(match.end() for match in re.finditer(r"\.", name))):
            if name[start:] in expected:
                counts[name[:start]] = counts.get(name[:start], 0) + 1
                break  # the longest match
    if not counts:  # distinguishes an adapter from another model
        return {name: name for name in names if ".lora_" in name}
    prefix = max(counts, key=lambda known: (counts[known], -len(known)))
    return {name.removeprefix(prefix): name for name in names if name.startswith(prefix)}


def is_moment(name: str) -> bool:
    """Return whether a flat name is that of one of AdamW's tensors for a parameter."""
    match = _MOMENT.fullmatch(name)
    return match is not None and match["key"] in ("exp_avg", "exp_avg_sq")


def without_optimizer(names: Iterable[str]) -> list[str]:
    """Return the flat names that do not belong to an optimizer."""
    names = list(names)
    starts = tuple({f"{_MOMENT.fullmatch(name)['prefix']}state." for name in names if is_moment(name)})
    return [name for name in names if not name.startswith(starts)]


def flat_state(names: Iterable[str], read: Callable[[str], Any]) -> dict[str, Any]:
    """Build AdamW's state_dict from flat names: `optimizer.state.NAME.exp_avg`, `optimizer.param_groups.0.lr`.

    read: returns the value of an entry, on demand. A group is a number, with `params`, or the name of its only
    parameter. Raises InputError for several optimizers, or if parameter groups are missing.
    """
    names = list(names)
    states = [match for name in names if (match := _MOMENT.fullmatch(name)) and is_moment(name)]
    prefixes = {match["prefix"] for match in states}
    if len(prefixes) != 1:
        shown = ", ".join(sorted(prefixes)[:3])
        raise InputError(f"it holds the states of {len(prefixes)} optimizers ({shown}); save only one")
    prefix = prefixes.pop()
    kept: dict[str, dict[str, str]] = {}
    for name in names:
        if (match := _MOMENT.fullmatch(name)) and match["prefix"] == prefix:
            kept.setdefault(match["name"], {})[match["key"]] = name
    groups: dict[str, dict[str, Any]] = {}
    for name in names:
        if (match := _GROUP.fullmatch(name)) and match["prefix"] == prefix:
            groups.setdefault(match["name"], {})[match["key"]] = read(name)
    if not groups:
        raise InputError("it holds moments but no param_groups, so betas and eps are unknown; save the whole optimizer")
    told = [{**values, "params": values.get("params", [name])} for name, values in groups.items()]
    if all(name.isdecimal() for name in kept):  # numbered as by optimizer.state_dict()
        state = {int(name): {key: read(entry) for key, entry in entries.items()} for name, entries in kept.items()}
        return numbered_state(state, told)
    moments = {name: {key: read(entry) for key, entry in entries.items()} for name, entries in kept.items()}
    return named_state(moments, told)


def named_state(moments: Mapping[str, Mapping[str, Any]], groups: list[dict[str, Any]]) -> dict[str, Any]:
    """Build AdamW's state_dict from moments by parameter name, and groups with names in `params`."""
    merged: dict[tuple[Any, ...], dict[str, Any]] = {}
    for group in groups:
        settings = {key: plain(value) for key, value in group.items() if key != "params"}
        key = tuple((name, str(value)) for name, value in sorted(settings.items()))
        merged.setdefault(key, settings | {"param_names": []})["param_names"] += [str(name) for name in group["params"]]
    numbers: dict[str, int] = {}
    for group in merged.values():
        for name in group["param_names"]:
            numbers[name] = len(numbers)
        group["params"] = [numbers[name] for name in group["param_names"]]
    if unknown := next((name for name in moments if name not in numbers), None):
        raise InputError(f"it holds moments of {unknown}, which no param_group lists; save the optimizer again")
    state = {numbers[name]: dict(kept) for name, kept in moments.items()}
    return {"state": state, "param_groups": list(merged.values())}


def numbered_state(state: dict[Any, dict[str, Any]], groups: list[dict[str, Any]]) -> dict[str, Any]:
    """Build AdamW's state_dict whose parameters are numbered as by `optimizer.state_dict()`."""
    return {"state": state, "param_groups": [{key: plain(value) for key, value in g.items()} for g in groups]}


def plain(value: Any) -> Any:
    """Convert a tensor with one entry to a number."""
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
