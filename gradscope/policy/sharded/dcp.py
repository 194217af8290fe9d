"""Checkpoints of torch.distributed.checkpoint (`.metadata` and `*.distcp`), read in one process."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Container
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata

from gradscope.errors import BROKEN_FILE, InputError, first_line
from gradscope.policy.sharded.joining import flat_state, is_moment, matching_names, without_optimizer
from gradscope.policy.sharded.layouts import Shards
from gradscope.runs import load_tensors, scratch_zeros

_CLASSES = (
    *(metadata.Metadata, metadata.TensorStorageMetadata, metadata.BytesStorageMetadata, metadata.ChunkStorageMetadata),
    *(metadata.TensorProperties, metadata.MetadataIndex, metadata.StorageMeta, metadata._MEM_FORMAT_ENCODING),
    *(filesystem._StorageInfo, torch.Size),
)
_KNOWN = {(kind.__module__, kind.__qualname__): kind for kind in _CLASSES}


def _text(*parts: object) -> str:
    """Stand in for a path, which is never followed."""
    return "/".join(map(str, parts))


_KNOWN |= {("pathlib", kind): _text for kind in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")}
_KNOWN |= {("torch.serialization", "_get_layout"): lambda name: torch.strided}


class _Metadata(pickle.Unpickler):
    """An unpickler that admits only the classes used in such metadata, since a pickle could run anything."""

    def find_class(self, module: str, name: str) -> Any:
        found = _KNOWN.get((module, name))
        if found is None and module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            found = getattr(torch, name)
        if found is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which does not belong in such metadata")
        return found


class Pieces:
    """The tensors and values of a checkpoint, by flat name."""

    def __init__(self, shards: Shards) -> None:
        self.folder = shards.folder
        found = _read_metadata(shards.folder / ".metadata")
        self.kinds: dict[str, Any] = found.state_dict_metadata
        self.places: dict[str, list[tuple[tuple[int, ...], Any]]] = {}
        for index, place in found.storage_data.items():
            self.places.setdefault(index.fqn, []).append((tuple(index.offset or ()), place))

    def tensors(self) -> list[str]:
        return [name for name, value in self.kinds.items() if isinstance(value, metadata.TensorStorageMetadata)]

    def read(self, name: str, make: Callable[..., Tensor] = torch.empty) -> Any:
        """Return a tensor joined from its pieces, or a saved value. make: allocates shape and dtype."""
        kind, places = self.kinds[name], self.places.get(name, [])
        if not isinstance(kind, metadata.TensorStorageMetadata):
            if len(places) != 1:
                raise InputError(f"{self.folder}/.metadata does not locate {name}; save the checkpoint again")
            return self._load(name, places[0][1])
        sizes, dtype = tuple(map(int, kind.size)), kind.properties.dtype
        chunks = {tuple(chunk.offsets): tuple(chunk.sizes) for chunk in kind.chunks}
        if prod(sizes) * dtype.itemsize > sum(place.length for _, place in places):
            raise InputError(f"{self.folder} holds only a part of {name}; save the checkpoint anew")
        whole, filled = make(sizes, dtype=dtype), 0
        for offsets, place in places:
            piece, wanted = self._load(name, place), chunks.get(offsets)
            if not isinstance(piece, Tensor) or tuple(piece.shape) != wanted or piece.dtype != dtype:
                raise InputError("it holds another piece than .metadata says", path=self.folder / place.relative_path)
            part = whole[tuple(slice(start, start + size) for start, size in zip(offsets, wanted, strict=True))]
            if part.shape != piece.shape:
                raise InputError(f"{self.folder}/.metadata puts a piece of {name} out of range; save it again")
            part.copy_(piece)
            filled += piece.numel()
        if filled != whole.numel():
            raise InputError(f"{self.folder} holds only a part of {name}; save the checkpoint anew")
        return whole

    def _load(self, name: str, place: Any) -> Any:
        relative = Path(str(place.relative_path))
        if relative.is_absolute() or ".." in relative.parts:
            raise InputError(f"{self.folder}/.metadata leads out of its folder ({relative}); nothing there was read")
        if getattr(place, "transform_descriptors", None):  # not in older versions
            how = ", ".join(map(str, place.transform_descriptors))
            raise InputError(f"{self.folder} was written with extensions ({how}); load it and save it without")
        return load_tensors(self.folder / relative, part=(int(place.offset), int(place.length)))


def read_weights(shards: Shards, expected: Container[str]) -> dict[str, Tensor]:
    """Return the model's weights by its own names, from any nested dictionary; empty if none are its own."""
    pieces = Pieces(shards)
    names = without_optimizer(pieces.tensors())
    return {own: pieces.read(name) for own, name in matching_names(names, expected).items()}


def has_moments(shards: Shards) -> bool:
    """Return whether the tensors include AdamW's moments."""
    return any(map(is_moment, Pieces(shards).tensors()))


def read_moments(shards: Shards) -> dict[str, Any]:
    """Return the optimizer's state in the form of AdamW's `state_dict()`, with parameter names."""
    pieces = Pieces(shards)
    # In scratch files, since moments take twice the model's memory.
    return flat_state(pieces.kinds, lambda name: pieces.read(name, lambda s, dtype: scratch_zeros(*s, dtype=dtype)))


def _read_metadata(path: Path) -> Any:
    """Read and check the metadata. Raises InputError if it is missing, damaged, or would execute anything."""
    if not path.is_file():
        raise InputError(f"{path.parent} holds .distcp files but no .metadata: its save did not end; give another one")
    try:
        with path.open("rb") as file:
            found = _Metadata(file).load()
        for kind in found.state_dict_metadata.values():
            if isinstance(kind, metadata.TensorStorageMetadata):
                _ = prod(map(int, kind.size)), kind.properties.dtype.itemsize
                _ = [(chunk.offsets, chunk.sizes) for chunk in kind.chunks]
        for index, place in found.storage_data.items():
            _ = index.fqn.strip, index.offset, place.length + place.offset, place.relative_path
    except (*BROKEN_FILE, MemoryError, RecursionError) as error:
        raise InputError(
            f"it cannot be read as a checkpoint's metadata ({first_line(error)}); nothing in it was run; "
            "save the checkpoint again",
            path=path,
        ) from error
    return found
