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

LARGEST_METADATA = 1 << 30
"""Bytes of .metadata; of 10,000 tensors in 1,000 pieces each it has a few hundred million."""
_CLASSES = (
    *(metadata.Metadata, metadata.TensorStorageMetadata, metadata.BytesStorageMetadata, metadata.ChunkStorageMetadata),
    *(metadata.TensorProperties, metadata.MetadataIndex, metadata.StorageMeta, metadata._MEM_FORMAT_ENCODING),
    *(filesystem._StorageInfo, torch.Size),
)
_KNOWN = {(kind.__module__, kind.__qualname__): kind for kind in _CLASSES}


def _text(*parts: object) -> str:
    """In the place of a path, which nobody follows."""
    return "/".join(map(str, parts))


_KNOWN |= {("pathlib", kind): _text for kind in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")}
_KNOWN |= {("torch.serialization", "_get_layout"): lambda name: torch.strided}


class _Metadata(pickle.Unpickler):
    """Makes the classes of which the metadata are built, and nothing else: a pickle could run anything."""

    def find_class(self, module: str, name: str) -> Any:
        found = _KNOWN.get((module, name))
        if found is None and module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            found = getattr(torch, name)
        if found is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of such metadata")
        return found


class Pieces:
    """The tensors and values of one checkpoint, by their flat names."""

    def __init__(self, shards: Shards) -> None:
        self.folder = shards.folder
        found = _read_metadata(shards.folder / ".metadata")
        self.kinds: dict[str, Any] = found.state_dict_metadata
        self.places: dict[str, list[tuple[tuple[int, ...], Any]]] = {}
        for index, place in found.storage_data.items():
            self.places.setdefault(index.fqn, []).append((tuple(index.offset or ()), place))

    def names(self, kind: type) -> list[str]:
        return [name for name, value in self.kinds.items() if isinstance(value, kind)]

    def read(self, name: str, make: Callable[..., Tensor] = torch.empty) -> Any:
        """Return a tensor put together of its pieces, or the value that was saved. make: the tensor of a shape and
        dtype.
        """
        kind, places = self.kinds[name], self.places.get(name, [])
        if not isinstance(kind, metadata.TensorStorageMetadata):
            if len(places) != 1:
                raise InputError(f"{self.folder}/.metadata says nowhere where {name} is; save the checkpoint anew")
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
                raise InputError(f"{self.folder}/.metadata places {name} outside of itself; save the checkpoint anew")
            part.copy_(piece)
            filled += piece.numel()
        if filled != whole.numel():
            raise InputError(f"{self.folder} holds only a part of {name}; save the checkpoint anew")
        return whole

    def _load(self, name: str, place: Any) -> Any:
        relative = Path(str(place.relative_path))
        if relative.is_absolute() or ".." in relative.parts:
            raise InputError(f"{self.folder}/.metadata leads out of its folder ({relative}); nothing there was read")
        if getattr(place, "transform_descriptors", None):  # older versions have none
            how = ", ".join(map(str, place.transform_descriptors))
            raise InputError(f"{self.folder} was written with extensions ({how}); load it and save it without")
        return load_tensors(self.folder / relative, part=(int(place.offset), int(place.length)))


def read_weights(shards: Shards, expected: Container[str]) -> dict[str, Tensor]:
    """Return the model's weights by its own names, in whatever dictionary they lie; empty where none is of this model.
    """
    pieces = Pieces(shards)
    names = without_optimizer(pieces.names(metadata.TensorStorageMetadata))
    return {own: pieces.read(name) for own, name in matching_names(names, expected).items()}


def has_moments(shards: Shards) -> bool:
    """Return whether AdamW's moments are among its tensors."""
    return any(map(is_moment, Pieces(shards).names(metadata.TensorStorageMetadata)))


def read_moments(shards: Shards) -> dict[str, Any]:
    """Return the optimizer's state as AdamW's `state_dict()` has it, with the parameters' names."""
    pieces = Pieces(shards)
    return flat_state(pieces.kinds, lambda name: pieces.read(name, _make_aside))


def _make_aside(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Moments are twice the model: in scratch files they are not the process's own memory."""
    return scratch_zeros(*shape, dtype=dtype)


def _read_metadata(path: Path) -> Any:
    """Return the table of contents, checked; InputError where it is not there, damaged, or would run something."""
    if not path.is_file():
        raise InputError(f"{path.parent} holds .distcp files and no .metadata: its save did not end; give another one")
    if path.stat().st_size > LARGEST_METADATA:
        raise InputError(f"{path} has {path.stat().st_size:,} bytes; give one of at most {LARGEST_METADATA:,}")
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
            f"it cannot be read as the table of contents of a checkpoint ({first_line(error)}); nothing in it was run; "
            "save the checkpoint anew",
            path=path,
        ) from error
    return found
