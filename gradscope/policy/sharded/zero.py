"""DeepSpeed's states under ZeRO 1 to 3: fp32 weights and AdamW's moments, from each rank's flat vectors.

Stages 1 and 2 concatenate a group's parameters and give each rank a section; the state says which entries belong to
which parameter (`param_slice_mappings`). Stage 3 gives each rank an equal section of every parameter, padding the last.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradscope.errors import BROKEN_FILE, InputError, first_line
from gradscope.policy.sharded.joining import GROUP_KEYS, matching_names, named_state
from gradscope.policy.sharded.layouts import Shards
from gradscope.runs import load_tensors, scratch_zeros

MOMENTS = ("exp_avg", "exp_avg_sq")
_MODEL = re.compile(r"(?:zero_pp_rank_(?P<rank>\d+)_)?mp_rank_(?P<part>\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:[a-z\d]+_)?zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<part>\d+)_optim_states\.pt")


class _Kept:
    """A stand-in for a small DeepSpeed object: its contents without its code."""

    def __init__(self, *_: Any) -> None:
        pass


_KNOWN = [
    (_Kept, f"deepspeed.{name}")
    for name in (
        *("runtime.fp16.loss_scaler.LossScaler", "runtime.fp16.loss_scaler.DynamicLossScaler"),
        *("runtime.zero.config.ZeroStageEnum", "utils.tensor_fragment.fragment_address"),
    )
]
"""Classes of objects in such states."""


class _States:
    """The memory-mapped files of all ranks, and the parameters extracted from them."""

    def __init__(self, shards: Shards) -> None:
        self.folder = shards.folder
        self.models = _load(shards, _MODEL, "_model_states.pt")
        self.optimizers = [state["optimizer_state_dict"] for state in _load(shards, _OPTIMIZER, "_optim_states.pt")]
        shapes = self.models[0].get("param_shapes") or []
        self.shapes: list[dict[str, Any]] = [shapes] if isinstance(shapes, dict) else list(shapes)
        """Per group: name → shape."""
        if not self.optimizers:
            return
        first = self.optimizers[0]
        self.is_third = "fp32_flat_groups" in first
        counts = first.get("partition_count", len(self.optimizers))
        counts = {counts} if isinstance(counts, int) else set(counts)
        if counts != {len(self.optimizers)} or (self.is_third and len(self.models) != len(self.optimizers)):
            ranks = " or ".join(map(str, sorted(counts)))
            raise InputError(
                f"{self.folder} holds optimizer states of {len(self.optimizers)} ranks and model states of "
                f"{len(self.models)}, but was saved by {ranks} ranks; copy the files of all ranks there"
            )

    def vectors(self, rank: int, kind: str) -> list[Tensor]:
        """Return a rank's flat vectors of the fp32 weights or of a moment, one per group (or part of one)."""
        state = self.optimizers[rank]
        weights = state["fp32_flat_groups" if self.is_third else "single_partition_of_fp32_groups"]
        if kind == "weights":
            return list(weights)
        kept = self.base_state(rank)["state"]
        found = [kept[index][kind] for index in range(len(weights))]
        if any(moment.shape != weight.shape for moment, weight in zip(found, weights, strict=True)):
            raise InputError(
                f"{self.folder}: moments and weights of rank {rank} differ in size; give another checkpoint"
            )
        return found

    def base_state(self, rank: int) -> dict[str, Any]:
        """Return the state_dict of the wrapped optimizer, whose parameters are the flat vectors."""
        found = self.optimizers[rank]["optimizer_state_dict" if self.is_third else "base_optimizer_state"]
        if not isinstance(found, dict):
            raise InputError(
                f"{self.folder} is an elastic checkpoint, without padding; save it with elastic_checkpoint false"
            )
        return found

    def whole(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and tensor of every trained parameter."""
        vectors = [self.vectors(rank, kind) for rank in range(len(self.optimizers))]
        for name, shape, pieces in self._in_stretches(vectors) if self.is_third else self._in_groups(vectors):
            flat = torch.cat([piece.flatten() for piece in pieces]) if len(pieces) != 1 else pieces[0].flatten()
            if len(flat) < prod(shape) or (not self.is_third and len(flat) != prod(shape)):
                raise InputError(
                    f"{self.folder} holds {len(flat):,} numbers of {name}, which has {prod(shape):,}; save it anew"
                )
            yield name, flat[: prod(shape)].view(tuple(shape))

    def _in_groups(self, vectors: list[list[Tensor]]) -> Iterator[tuple[str, Sequence[int], list[Tensor]]]:
        for group, shapes in enumerate(self.shapes):
            maps = [state["param_slice_mappings"][group] for state in self.optimizers]
            for name, shape in shapes.items():
                cuts = [(rank, found) for rank, known in enumerate(maps) if (found := known.get(name)) is not None]
                yield name, shape, [vectors[rank][group].narrow(0, cut.start, cut.numel) for rank, cut in cuts]

    def _in_stretches(self, vectors: list[list[Tensor]]) -> Iterator[tuple[str, Sequence[int], list[Tensor]]]:
        start, ranks = 0, len(vectors)
        for shapes in self.shapes:
            for name, shape in shapes.items():
                length = -(-prod(shape) // ranks)
                yield name, shape, [piece for parts in vectors for piece in _cut(parts, start, length)]
                start += length
        if start != sum(map(len, vectors[0])):
            raise InputError(f"{self.folder} holds more entries than its parameters have; save it again")

    def others(self) -> dict[str, Tensor]:
        """Return tensors outside the optimizer, such as frozen parameters and buffers; below stage 3, all."""
        first = self.models[0]
        if not self.is_third:
            return dict(first["module"])
        found = {name: first["module"][name] for name in first.get("buffer_names") or () if name in first["module"]}
        for name, shape in (first.get("frozen_param_shapes") or {}).items():
            flat = torch.cat([model["frozen_param_fragments"][name].flatten() for model in self.models])
            found[name] = flat[: prod(shape)].view(tuple(shape))
        return found


def read_weights(shards: Shards, expected: Container[str]) -> dict[str, Tensor]:
    """Return the model's fp32 weights by its own names; empty if none belong to this model."""
    with _in_words(shards):
        states = _States(shards)
        if states.optimizers:
            found = states.others() | dict(states.whole("weights"))
            shared = states.models[0].get("shared_params") or {}
            found |= {name: found[source] for name, source in dict(shared).items() if source in found}
        else:  # stage 0: whole weights
            found = dict(states.models[0]["module"])
    return {own: found[name] for own, name in matching_names(found, expected).items()}


def read_moments(shards: Shards) -> dict[str, Any]:
    """Return the optimizer's state in the form of AdamW's `state_dict()`, with parameter names."""
    with _in_words(shards):
        states = _States(shards)
        base = states.base_state(0)
        told = [{key: group[key] for key in GROUP_KEYS if key in group} for group in base["param_groups"]]
        # A group's flat vectors: one or, at stage 3, one per sub-group.
        numbers = [number for group in base["param_groups"] for number in group["params"]]
        if numbers != [*range(len(states.shapes))]:
            raise InputError(f"{shards.folder} has {len(numbers)} flat vectors and names of {len(states.shapes)}")
        moments: dict[str, dict[str, Any]] = {}
        for group, flat in zip(told, base["param_groups"], strict=True):
            group["params"] = [name for number in flat["params"] for name in states.shapes[number]]
            moments |= {name: {"step": _steps(states, base)} for name in group["params"]}
        for kind in MOMENTS:
            for name, tensor in states.whole(kind):
                moments[name][kind] = scratch_zeros(*tensor.shape, dtype=tensor.dtype).copy_(tensor)
    return named_state(moments, told)


@contextmanager
def _in_words(shards: Shards) -> Iterator[None]:
    """Convert errors from a malformed checkpoint to InputError."""
    try:
        yield
    except InputError:
        raise
    except BROKEN_FILE as error:
        folder = shards.folder
        raise InputError(
            f"{folder} is not built like DeepSpeed's AdamW states ({type(error).__name__}: {first_line(error)}); "
            f"merge the weights with `python -m deepspeed.utils.zero_to_fp32 {folder.parent} DIR --tag {folder.name}`"
        ) from error


def _steps(states: _States, base: dict[str, Any]) -> int:
    """Return the optimizer's step count, from its state or group, or else DeepSpeed's."""
    counts = {int(kept["step"]) for kept in base["state"].values() if "step" in kept}
    counts = counts or {int(group["step"]) for group in base["param_groups"] if "step" in group}
    counts = counts or {int(states.models[0]["global_steps"]) - int(states.models[0].get("skipped_steps", 0))}
    if len(counts) > 1:
        raise InputError(f"{states.folder}: the groups have different step counts; give another checkpoint")
    return counts.pop()


def _cut(vectors: list[Tensor], start: int, length: int) -> Iterator[Tensor]:
    """Yield a range of entries from the concatenation of vectors."""
    for vector in vectors:
        part = vector[max(start, 0) : max(start + length, 0)]
        if len(part):
            yield part
        start -= len(vector)


def _load(shards: Shards, pattern: re.Pattern[str], ending: str) -> list[dict[str, Any]]:
    """Load each rank's file in order, memory-mapped, without executing anything in it."""
    files: dict[int, Path] = {}
    for file in shards.files:
        if file.name.endswith(ending):
            match = pattern.fullmatch(file.name)
            if match is None or int(match["part"]):
                raise InputError(
                    f"{shards.folder} holds {file.name}, but layers or experts split over ranks are not joined "
                    "here; save the whole model in its trainer"
                )
            files[int(match["rank"] or 0)] = file
    if missing := sorted(set(range(max(files, default=-1) + 1)) - files.keys()):
        raise InputError(f"{shards.folder} lacks the states of rank {missing[0]}; copy the files of all ranks there")
    states = [load_tensors(files[rank], mapped=True, known=_KNOWN) for rank in sorted(files)]
    for rank, state in enumerate(states):
        if not isinstance(state, dict):
            raise InputError("it does not have the structure of DeepSpeed's states", path=files[rank])
    return states
