"""Errors that end a command: bad input, or results that cannot be trusted."""

from __future__ import annotations

import inspect
import json
import pickle
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar, get_type_hints

BROKEN_FILE = (OSError, EOFError, struct.error, pickle.UnpicklingError, RuntimeError)
BROKEN_FILE += (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, ImportError)
"""Errors that file parsers raise on malformed content."""
# One import each, as type checkers require.
P = ParamSpec("P")
Result = TypeVar("Result")


class InputError(ValueError):
    """Bad input by the user: one line says what is wrong, where, and what to do (the CLI exits with 2).

    path: the file at fault, named before the reason.

    >>> error = InputError("it is empty; give a prompt per line", path="prompts.txt")
    >>> str(error), error.reason
    ('prompts.txt: it is empty; give a prompt per line', 'it is empty; give a prompt per line')
    """

    def __init__(self, reason: str, *, path: object = None) -> None:
        self.reason = printable(reason)
        super().__init__(self.reason if path is None else printable(f"{path}: {reason}"))


LESS_MEMORY = "try a smaller --chunk-memory, --micro-batch-size, --batch-size or --dtype, or --no-figures"
"""Advice when memory runs out."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether Python or torch (on a device, or on the CPU, where torch has no separate error type) ran out of
    memory.

    >>> is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"))
    True
    """
    kinds = {kind.__name__ for kind in type(error).__mro__}  # by name, to avoid importing torch
    return bool(kinds & {"MemoryError", "OutOfMemoryError"}) or "allocate memory" in str(error)


class NanLogitsError(InputError):
    """The policy's logits are NaN, so nothing can be sampled; in training, it has diverged."""


class SelfCheckError(RuntimeError):
    """The engine disagrees with plain autograd on this model; nothing was measured (the CLI exits with 1)."""


class SyncError(RuntimeError):
    """The sampler does not use the trained weights (the CLI exits with 1)."""


class DivergedError(RuntimeError):
    """The training gradient is no longer finite; the checkpoints are kept (the CLI exits with 1)."""


def unpickling_reason(error: Exception) -> str:
    """Return in one line why torch.load(weights_only=True) refused a file, without its advice to disable that.

    >>> unpickling_reason(ValueError("Weights only load failed. Re-run with False.\\n\\nUnsupported operand 149\\n"))
    'Unsupported operand 149'
    """
    lines = [line.strip() for line in str(error).splitlines()]
    named = [line for line in lines if "unsupported" in line.lower()]
    said = [at for at, line in enumerate(lines) if line.endswith("WeightsUnpickler error:")]
    named += [line for line in lines[said[0] + 1 :] if line][:1] if said else []
    return (named or [first_line(error)])[0][:160]


def show(value: Any) -> str:
    """Format any value for an error message, as JSON of at most 40 characters.

    >>> show([1, None, "a"]), show([[0] * 10**6])
    ('[1, null, "a"]', '[[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,…')
    """
    text = ""
    try:
        for part in json.JSONEncoder(default=str, ensure_ascii=False).iterencode(value):
            text += part
            if len(text) > 40:
                break
    except (ValueError, TypeError, RuntimeError):  # self-reference, a number of 5,000 digits, an invalid name
        text = f"{text} {type(value).__name__}".ljust(41)
    return text if len(text) <= 40 else text[:37].rstrip() + "…"


def printable(text: str) -> str:
    """Return text on one line, with control and invisible characters escaped.

    >>> print(printable("a" + chr(10) + "b" + chr(0x202E)))
    a\\nb\\u202e
    """
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def first_line(error: Exception) -> str:
    """Return the first line of an error's message; its type if the message is empty.

    >>> first_line(ValueError("no such key.\\nTraceback …"))
    'no such key'
    """
    line = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".!:")
    return line if len(line) <= 300 else f"{line[:300]}…"


@contextmanager
def normal_tensors() -> Iterator[None]:
    """Leave the caller's `torch.inference_mode`, whose tensors take part in no gradient; without it, do nothing."""
    torch = sys.modules.get("torch")  # not imported here, so that `--help` does not load it
    if torch is None or not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def checked(function: Callable[P, Result], name: str | None = None) -> Callable[P, Result]:
    """Decorate a function to raise an error that names any argument whose type does not match its annotation.

    TypeError for a wrong type, InputError for an unknown word. The function runs outside `torch.inference_mode`.
    name: in errors; None: the function's own.

    >>> @checked
    ... def draw(n: int, *, temperature: float = 1.0): ...
    >>> draw("4")
    Traceback (most recent call last):
    TypeError: draw: n is '4', of type str; wanted: int
    >>> draw(4, temprature=0.7)
    Traceback (most recent call last):
    TypeError: draw: got an unexpected keyword argument 'temprature'; did you mean 'temperature'?
    """
    signature, title = inspect.signature(function), name or function.__name__
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    own = [name for name, parameter in signature.parameters.items() if parameter.kind not in variable]
    hints = cache(lambda: get_type_hints(function))  # at the first call, since some names are loaded lazily

    @wraps(function)
    def call(*args: P.args, **keywords: P.kwargs) -> Result:
        try:
            given = signature.bind(*args, **keywords).arguments
        except TypeError as error:
            near = [match for name in keywords if name not in own for match in get_close_matches(name, own, 1)]
            advice = f"; did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"{title}: {error}{advice}") from None
        for name in own:
            if name in given and name in hints() and not _fits(given[name], hints()[name]):
                value, wanted = given[name], str(function.__annotations__[name])
                if isinstance(value, str) and "Literal" in wanted:
                    raise InputError(f"{title}: {name} is {value!r:.60}; wanted: {wanted}")
                shown = f"{value!r:.60}, " if isinstance(value, str | int | float) else ""
                words = f"{name} is {shown}of type {type(value).__name__}"
                raise TypeError(f"{title}: {words}; wanted: {wanted}")
        with normal_tensors():
            return function(*args, **keywords)

    return call


def _fits(value: Any, hint: Any) -> bool:
    """Return whether a value has a type; numpy numbers count as numbers."""
    import numpy as np
    from beartype import BeartypeConf, FrozenDict
    from beartype.door import is_bearable

    numbers = FrozenDict({int: int | np.integer, float: float | int | np.floating | np.integer})
    return is_bearable(value, hint, conf=BeartypeConf(hint_overrides=numbers))
