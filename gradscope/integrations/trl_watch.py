"""Methods of a trainer that are looked at from outside while it trains, by several at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Makes of a trainer's method one that looks at its arguments or its result."""
WATCHED = "_gradscope_watched"
"""Attribute of a trainer: its lookers' wrappers, and what it had itself of these methods."""


def watch(trainer: Any, looker: object, wrappers: Mapping[str, Wrapper] | None = None) -> None:
    """Put the wrappers around the trainer's methods of these names, in place of the looker's earlier ones; None: none.

    Every other looker's stay, and with the last one gone the trainer is as it was.
    """
    lookers, own = vars(trainer).setdefault(WATCHED, ({}, {}))
    for name, method in own.items():
        vars(trainer).pop(name, None)
        if method is not None:
            setattr(trainer, name, method)
    own.clear()
    lookers.pop(id(looker), None)
    if wrappers is not None:
        lookers[id(looker)] = wrappers
    for name in {name for each in lookers.values() for name in each}:
        own[name] = vars(trainer).get(name)
    for each in lookers.values():
        for name, wrap in each.items():
            setattr(trainer, name, wrap(getattr(trainer, name)))
