"""Wrap a trainer's methods during training, for several observers at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Turns a trainer's method into one that also observes its arguments or result."""
WATCHED = "_gradscope_watched"
"""Attribute of a trainer: the observers' wrappers, and the instance's own versions of these methods."""


def watch(trainer: Any, looker: object, wrappers: Mapping[str, Wrapper] | None = None) -> None:
    """Wrap the trainer's methods of these names, replacing the looker's earlier wrappers; None removes them.

    Wrappers of other lookers stay; once the last is removed, the trainer is as before.
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
