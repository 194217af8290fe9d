"""Stand-ins for what others pickled: arrays of numpy become plain numbers, every other object nothing at all.

torch's own unpickler (weights_only) asks by name for each class and function that a file wants, and refuses those that
it does not know. A log may name many that no number depends on: the settings of an adapter, a date, a tool's answer.
Here each such name is answered by a class of this file, so that nothing of anybody else's is imported or run.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

KINDS = "biuf"
"""numpy's letters for what has plain numbers: truth values, whole ones, whole ones above 0, floating ones."""


class Inert:
    """An object that was not made: any arguments, any state, nothing kept."""

    def __new__(cls, *_arguments: Any, **_named: Any) -> Inert:
        return object.__new__(cls)

    def __setstate__(self, _state: Any) -> None:
        pass

    def __repr__(self) -> str:
        return "an object whose code was not run"


class _Dtype(Inert):
    """numpy.dtype, of which a letter with a size and the order of bytes are kept."""

    code, order = "", "="

    def __new__(cls, *arguments: Any) -> _Dtype:
        made = object.__new__(cls)
        if arguments and isinstance(arguments[0], str):
            made.code = arguments[0]
        return made

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple) and len(state) > 1 and state[1] in ("<", ">", "|", "="):
            self.order = state[1]

    def plain(self) -> np.dtype | None:
        """numpy's own, where its values are plain numbers."""
        if self.code[:1] not in [*KINDS] or not self.code[1:].isdecimal() or len(self.code) > 3:
            return None
        try:
            return np.dtype(self.order.replace("|", "=") + self.code)
        except TypeError:
            return None


class Array(Inert):
    """numpy.ndarray, as it stands in the file."""

    _state: tuple = ()

    def __setstate__(self, state: Any) -> None:
        self._state = state if isinstance(state, tuple) else ()

    def numbers(self) -> Any:
        """Its numbers as lists; ValueError where it has other things than numbers, or not as many as its shape says."""
        _, shape, dtype, by_column, data = self._state if len(self._state) == 5 else [None] * 5
        plain = dtype.plain() if isinstance(dtype, _Dtype) else None
        sizes = isinstance(shape, tuple) and all(isinstance(n, int) and n >= 0 for n in shape)
        if plain is None or not isinstance(data, bytes) or not sizes or len(shape) > 32:
            raise ValueError("an array of other things than numbers")
        return np.frombuffer(data, plain).reshape(shape, order="F" if by_column else "C").tolist()


def _scalar(dtype: Any = None, data: Any = None, *_: Any) -> Any:
    """numpy's scalar: its number, or an object that was not made."""
    plain = dtype.plain() if isinstance(dtype, _Dtype) else None
    if plain is None or not isinstance(data, bytes) or len(data) != plain.itemsize:
        return Inert()
    return np.frombuffer(data, plain)[0].item()


def _array(*_: Any) -> Array:
    return Array()


def _dictionary(*_: Any) -> dict[Any, Any]:
    """Empty; the unpickler puts the items in."""
    return {}


KNOWN: dict[str, Any] = {
    "numpy.ndarray": Array,
    "numpy.dtype": _Dtype,
    "collections.defaultdict": _dictionary,
}
for _place in ("numpy.core.multiarray", "numpy._core.multiarray"):  # numpy 1, numpy 2
    KNOWN |= {f"{_place}._reconstruct": _array, f"{_place}.scalar": _scalar}


def stand_ins(names: Iterable[str]) -> list[tuple[Any, str]]:
    """(stand-in, name) for each of the names, as torch.serialization.safe_globals takes them."""
    return [(KNOWN[name] if name in KNOWN else type("Inert", (Inert,), {}), name) for name in names]
