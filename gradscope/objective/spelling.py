"""What has parameters, in one word: `NAME:key=value,…`."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from gradscope.errors import InputError


def parse_parameters(name: str, given: str, sorts: Mapping[str, type]) -> dict[str, Any]:
    """Parse `key=value,…`, each value of its key's type. Raises InputError, naming `name`, for what does not fit.

    >>> parse_parameters("jsd", "beta=.3,top=20", {"beta": float, "top": int})
    {'beta': 0.3, 'top': 20}
    """
    values: dict[str, Any] = {}
    for part in filter(None, given.split(",")):
        key, _, value = part.partition("=")
        if key not in sorts:
            raise InputError(f"{name} takes no {key!r}; {nearest(key, sorts)}")
        if key in values:
            raise InputError(f"{name}: {key} is given twice; give it once")
        try:
            values[key] = sorts[key](value)
        except ValueError as error:
            number = "whole number" if sorts[key] is int else "number"
            raise InputError(f"{name}: {key} is {value!r}; give a {number}") from error
    return values


def nearest(word: str, known: Mapping[str, object]) -> str:
    """Return a hint with the nearest name and all names."""
    near = get_close_matches(word, known, n=1)
    return (f"did you mean {near[0]}? " if near else "") + f"known: {', '.join(known) or 'none'}"
