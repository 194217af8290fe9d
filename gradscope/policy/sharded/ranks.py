"""Shards that each rank saved with torch.save, as in verl, SkyRL and accelerate: parts of DTensors."""

from __future__ import annotations

import logging
import re
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch import Tensor

from gradscope.errors import InputError
from gradscope.policy.sharded.joining import flat_state, is_moment, matching_names, named_state, numbered_state
from gradscope.policy.sharded.layouts import Shards, find_weights
from gradscope.runs import load_tensors, read_json, scratch_zeros


def read_weights(shards: Shards, expected: Container[str]) -> dict[str, Tensor]:
    """Return the model's weights by its own names; empty if none belong to this model."""
    states = _load(shards)
    tensors = [name for name, value in states[0].items() if isinstance(value, Tensor)]
    return {own: _join(shards, states, name) for own, name in matching_names(tensors, expected).items()}


def read_moments(shards: Shards) -> dict[str, Any]:
    """Return the whole optimizer state in the form of AdamW's `state_dict()`."""
    states = _load(shards)
    if "state" not in states[0] and any(map(is_moment, states[0])):  # saved with flatten_optimizer_state_dict
        return flat_state(states[0], lambda name: _keep(_join(shards, states, name)))
    kept = [state.get("state") for state in states]
    groups = states[0].get("param_groups")
    if not all(isinstance(entry, dict) for entry in kept) or not isinstance(groups, list):
        raise InputError(f"{shards.files[0]} is not an optimizer state; give the folder of a state saved by AdamW")
    if _is_flat(kept):
        return _state_of_stretches(shards, kept, groups)
    if any(entry.keys() != kept[0].keys() for entry in kept):
        raise InputError(f"{shards.folder}: the ranks hold moments of different parameters; save the optimizer again")
    state = {
        key: {name: _keep(_join(shards, [entry[key] for entry in kept], name)) for name in kept[0][key]}
        for key in kept[0]
    }
    if all(isinstance(key, str) for group in groups for key in group["params"]):  # FSDP's full state dict
        return named_state(state, groups)
    return numbered_state(state, groups)


def _is_flat(kept: Sequence[dict[Any, Any]]) -> bool:
    """Return whether moments are plain vectors, sections of FSDP 1's flat parameters by rank."""
    from torch.distributed.tensor import DTensor

    moments = [entry.get("exp_avg") for states in kept for entry in states.values()]
    plain = all(isinstance(m, Tensor) and not isinstance(m, DTensor) and m.dim() == 1 for m in moments)
    return len(kept) > 1 and bool(moments) and plain


def _state_of_stretches(shards: Shards, kept: Sequence[dict[Any, Any]], groups: list[dict[str, Any]]) -> dict[str, Any]:
    """Build AdamW's state_dict from sections of flat vectors, using the names and shapes of the weights.

    FSDP 1 concatenates the parameters of a unit in the model's order and gives each rank an equal section, padding the
    last; the units are everything outside the blocks, then each block. With use_orig_params each parameter has a
    separate entry with the part in the rank's section. Raises InputError unless every entry of the sections is
    accounted for.
    """
    weights = find_weights(shards.folder)
    if weights is None or weights.kind != "ranks" or len(groups) != 1:
        raise InputError(f"{shards.folder}: moments are flat, and no sharded weights identify their parameters")
    shapes = {name: tuple(value.shape) for name, value in _load(weights)[0].items() if isinstance(value, Tensor)}
    # A tied head is among the weights, under both names, but not among the parameters.
    for names in (list(shapes), [name for name in shapes if name != "lm_head.weight"]):
        if (places := _places(names, shapes, groups[0]["params"], kept)) is not None:
            break
    else:
        raise InputError(
            f"{shards.folder}: FSDP 1 saved moments without names, in units other than blocks; train with fsdp2 (verl: "
            "strategy=fsdp2)"
        )
    moments = {}
    for name, (key, start) in places.items():
        parts = [entry[key] for entry in kept if key in entry]
        end = start + prod(shapes[name])
        moments[name] = {"step": parts[0]["step"]}
        for kind in ("exp_avg", "exp_avg_sq"):
            flat = torch.cat([part[kind] for part in parts])
            moments[name][kind] = _keep(flat[start:end].view(shapes[name]))
    return named_state(moments, [groups[0] | {"params": list(places)}])


def _places(
    names: list[str], shapes: dict[str, tuple[int, ...]], params: list[Any], kept: Sequence[dict[Any, Any]]
) -> dict[str, tuple[Any, int]] | None:
    """Map names to (key of the state, offset within all ranks' parts); None if the sizes do not match."""
    held = {key: sum(len(entry[key]["exp_avg"]) for entry in kept if key in entry) for key in params}
    if len(params) == len(names):  # use_orig_params
        fits = all(held[key] in (0, prod(shapes[name])) for key, name in zip(params, names, strict=True))
        return {name: (key, 0) for key, name in zip(params, names, strict=True) if held[key]} if fits else None
    units: dict[str, list[str]] = {"": []}
    for name in names:
        block = re.match(r".*?\.\d+\.", name)
        units.setdefault(block[0] if block else "", []).append(name)
    if len(units) != len(params):
        return None
    places: dict[str, tuple[Any, int]] = {}
    for key, unit in zip(params, units.values(), strict=True):
        start = 0
        for name in unit:
            places[name] = key, start
            start += prod(shapes[name])
        if held[key] not in (0, -(-start // len(kept)) * len(kept)):
            return None
    return {name: place for name, place in places.items() if held[place[0]]}


def _load(shards: Shards) -> list[dict[Any, Any]]:
    """Load each rank's file, memory-mapped, without executing anything in it."""
    import torch.distributed.tensor  # noqa: F401  torch then knows DTensor and its parts as safe to load

    told = (read_json(shards.folder / "fsdp_config.json") or {}).get("world_size")
    if isinstance(told, int) and "world_size" in shards.files[0].name and told != len(shards.files):
        raise InputError(
            f"{shards.folder}: fsdp_config.json is of {told} processes, the shards of {len(shards.files)}; keep the "
            "files of one save"
        )
    with _quiet_mesh():
        states = [load_tensors(file, mapped=True) for file in shards.files]
    for file, state in zip(shards.files, states, strict=True):
        if not isinstance(state, dict) or state.keys() != states[0].keys():
            raise InputError(f"{file} holds different names than rank 0's; copy the files of one save there")
    return states


@contextmanager
def _quiet_mesh() -> Iterator[None]:
    """Suppress the warning that a device mesh was loaded without its processes."""
    logger = logging.getLogger("torch.distributed.device_mesh")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _keep(value: Any) -> Any:
    """Put a large moment into a scratch file, since all moments together take twice the model's memory."""
    if not isinstance(value, Tensor) or not value.dim():
        return value
    return scratch_zeros(*value.shape, dtype=value.dtype).copy_(value)


def _join(shards: Shards, states: Sequence[dict[Any, Any]], name: Any) -> Any:
    """Join one entry from all ranks' parts."""
    from torch.distributed.tensor import DTensor

    parts = [state.get(name) for state in states]
    if not any(isinstance(part, DTensor) for part in parts):
        same = all(torch.equal(part, parts[0]) if isinstance(part, Tensor) else part == parts[0] for part in parts)
        if not same:
            raise InputError(f"{shards.folder}: {name} differs between the ranks, but does not say how it was sharded")
        return parts[0]
    if not all(isinstance(part, DTensor) for part in parts):
        raise InputError(f"{shards.folder}: {name} is sharded on some ranks only; copy the files of one save there")
    mesh, placements, shape = parts[0].device_mesh.mesh, parts[0].placements, parts[0].shape
    if mesh.numel() != len(parts) or sorted(mesh.flatten().tolist()) != list(range(len(parts))):
        raise InputError(
            f"{shards.folder}: {name} was sharded over {mesh.numel()} ranks, but there are files of {len(parts)}; "
            "copy the files of all ranks there"
        )
    whole = _assemble(mesh, placements, [part._local_tensor for part in parts])
    if whole is None or whole.shape != shape:
        raise InputError(
            f"{shards.folder}: the parts of {name} do not form {tuple(shape)} ({', '.join(map(str, placements))}); "
            f"merge it with `python -m verl.model_merger merge --backend fsdp --local_dir {shards.folder} --target_dir "
            "DIR`"
        )
    return whole


def _assemble(mesh: Tensor, placements: Sequence[Any], local: Sequence[Tensor]) -> Tensor | None:
    """Join a tensor whose parts are consecutive or replicated along each mesh dimension; None for other shardings.

    mesh: ranks, with one dimension per placement.
    """
    if not placements:
        return local[int(mesh)]
    kind, parts = type(placements[0]).__name__, [_assemble(part, placements[1:], local) for part in mesh]
    if kind == "Replicate":
        return parts[0]
    if kind != "Shard" or any(part is None for part in parts):
        return None
    return parts[0] if len(parts) == 1 else torch.cat(parts, placements[0].dim)
