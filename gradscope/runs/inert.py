"""Stand-ins for pickled objects: numpy arrays become plain numbers, everything else an inert object.

torch's restricted unpickler (weights_only) looks up each class and function by name and refuses unknown ones. A log may
contain many that do not matter: an adapter's settings, a date, a tool's answer. Each such name is resolved to a class
of this module, so that no foreign code is imported or executed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

KINDS = "biuf"
"""numpy's dtype kinds for plain numbers: booleans, signed and unsigned integers, floats."""


class Inert:
    """A placeholder for an object: accepts any arguments and state, and keeps nothing."""

    def __new__(cls, *_arguments: Any, **_named: Any) -> Inert:
        return object.__new__(cls)

    def __setstate__(self, _state: Any) -> None:
        pass

    def __repr__(self) -> str:
        return "an object whose code was not run"

    def tolist(self) -> Any:
        """Raise ValueError: it holds no numbers."""
        raise ValueError(f"it is {self!r}")


class _Dtype(Inert):
    """A stand-in for numpy.dtype that keeps its kind, size and byte order."""

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
        """Return the numpy dtype if its values are plain numbers."""
        if self.code[:1] not in [*KINDS] or not self.code[1:].isdecimal() or len(self.code) > 3:
            return None
        try:
            return np.dtype(self.order.replace("|", "=") + self.code)
        except TypeError:
            return None


class _Array(Inert):
    """A stand-in for numpy.ndarray."""

    _state: tuple = ()

    def __setstate__(self, state: Any) -> None:
        self._state = state if isinstance(state, tuple) else ()

    def tolist(self) -> Any:
        """Return the numbers as lists. Raises ValueError for other contents, or if they do not fill the shape."""
        _, shape, dtype, by_column, data = self._state if len(self._state) == 5 else [None] * 5
        plain = dtype.plain() if isinstance(dtype, _Dtype) else None
        sizes = isinstance(shape, tuple) and all(isinstance(n, int) and n >= 0 for n in shape)
        if plain is None or not isinstance(data, bytes) or not sizes or len(shape) > 32:
            raise ValueError("an array that does not hold numbers")
        return np.frombuffer(data, plain).reshape(shape, order="F" if by_column else "C").tolist()


def _scalar(dtype: Any = None, data: Any = None, *_: Any) -> Any:
    """Return a numpy scalar's number, or an inert object."""
    plain = dtype.plain() if isinstance(dtype, _Dtype) else None
    if plain is None or not isinstance(data, bytes) or len(data) != plain.itemsize:
        return Inert()
    return np.frombuffer(data, plain)[0].item()


KNOWN: dict[str, Any] = {
    "numpy.ndarray": _Array,
    "numpy.dtype": _Dtype,
    "collections.defaultdict": lambda *_: {},  # for the unpickler to fill
}
for _place in ("numpy.core.multiarray", "numpy._core.multiarray"):  # numpy 1, numpy 2
    KNOWN |= {f"{_place}._reconstruct": lambda *_: _Array(), f"{_place}.scalar": _scalar}


def stand_ins(names: Iterable[str]) -> list[tuple[Any, str]]:
    """Return (stand-in, name) for each name, for torch.serialization.safe_globals."""
    return [(KNOWN[name] if name in KNOWN else type("Inert", (Inert,), {}), name) for name in names]
