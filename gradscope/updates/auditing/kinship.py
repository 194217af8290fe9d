"""What the parameters that a trainer's gradient is wrong in have in common, and no others have."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

Home = tuple[int | None, str]
"""A parameter's layer (None: outside of them) and module group."""
SHARDED = (
    "all-reduce the gradients of norms and biases under tensor or sequence parallelism, once: a rank has the sum over "
    "its own part of the tokens"
)
TIED = "add the gradients of both uses of tied weights"
BACK = (
    "look at what goes back from there: an all-reduce that is missing, as under a vocabulary-parallel head, a detach, "
    "a hook"
)
STAGE = "look at what is set apart there: a pipeline stage, activation checkpointing, a hook"
REMEDIES = {
    "norms": SHARDED,
    "one-dimensional": SHARDED,
    "embedding and head": TIED,
    "adapter A": "look at the adapter's scaling, alpha/r, and how often it is applied",
    "attention k": "sum the gradients of k and v over ranks that share their heads",
}
REMEDIES |= {"adapter B": REMEDIES["adapter A"], "attention v": REMEDIES["attention k"]}
"""A kind of parameters → what to do."""


class Kinship(NamedTuple):
    """A kind of parameters."""

    name: str
    """A module group, one-dimensional, layer N, from layer N on, up to layer N, outside the layers, a name's ending, a
    shape, or below the head, the last norm or layer N: all that the backward pass reaches after it, in or after it."""
    remedy: str | None
    """What to do if these alone are wrong; None: it does not say."""
    words: str = ""
    """A sentence; empty: the name says it."""


def find_kinship(
    odd: Collection[str], known: Sequence[str], homes: Mapping[str, Home], shapes: Mapping[str, Sequence[int]]
) -> Kinship | None:
    """Return the kind that the odd parameters are, and none other of the known ones; None: no kind that is tried.

    >>> homes = {"0.q": (0, "attention q"), "0.norm": (0, "norms"), "1.q": (1, "attention q"), "1.norm": (1, "norms")}
    >>> shapes = {"0.q": (2, 2), "0.norm": (2,), "1.q": (2, 2), "1.norm": (2,)}
    >>> [find_kinship(odd, [*homes], homes, shapes).name for odd in (["0.norm", "1.norm"], ["1.q", "1.norm"])]
    ['norms', 'layer 1']
    """
    below = _below(odd, known, homes)
    for kinds in zip(*(_kinds(name, homes, shapes) for name in known), strict=True):
        own = {kind for name, kind in zip(known, kinds, strict=True) if name in odd}
        if len(own) == 1 and own != {""} and sum(kind in own for kind in kinds) == len(odd) < len(known):
            [name] = own
            if name == "embedding" and below is not None:
                return below._replace(name=name)
            return Kinship(name, REMEDIES.get(name, STAGE if "layer" in name else None))
    layers = [homes[name][0] for name in odd]
    if None in layers or not layers:
        return below
    low, high = min(layers), max(layers)
    inside = {name: homes[name][0] for name in known if homes[name][0] is not None}
    for name, kept in (
        (f"from layer {low} on", {n for n, layer in inside.items() if layer >= low}),
        (f"up to layer {high}", {n for n, layer in inside.items() if layer <= high}),
    ):
        if kept == {*odd} != {*inside}:
            return Kinship(name, STAGE, below.words if below else "")
    return below


def _below(odd: Collection[str], known: Sequence[str], homes: Mapping[str, Home]) -> Kinship | None:
    """Return all that the backward pass reaches after some place, if these are the odd parameters.

    >>> homes = {"head": (None, "head"), "norm": (None, "norms"), "0": (0, "MLP"), "in": (None, "embedding")}
    >>> [_below(odd, [*homes], homes).name for odd in (["norm", "0", "in"], ["0", "in"], ["in"])]
    ['below the head', 'below the last norm', 'below layer 0']
    """
    last = max((layer for layer, _ in homes.values() if layer is not None), default=0)
    outside = {"head": last + 2, "norms": last + 1}
    stages = {name: outside.get(homes[name][1], -1) if homes[name][0] is None else homes[name][0] for name in known}
    wrong = {stages[name] for name in odd}
    right = {stage for name, stage in stages.items() if name not in odd}
    if not wrong or not right or max(wrong) > min(right):
        return None
    least, inside = min(right), min(right) in wrong
    if inside and (least > last or right == {least} or min(wrong) == least):
        return None
    where = {last + 2: "the head", last + 1: "the last norm"}.get(least, f"layer {least}")
    name = f"{'in and ' * inside}below {where}"
    words = f"The gradient is right {'down to' if least <= last else 'at'} {where}, and wrong below it"
    if inside:
        words = f"The gradient is right above {where}, wrong in a part of it, and wrong below it"
    return Kinship(name, BACK, f"{words}: what goes back from there is wrong.")


def _kinds(name: str, homes: Mapping[str, Home], shapes: Mapping[str, Sequence[int]]) -> Iterator[str]:
    """Yield the kinds of a parameter; "": it is not of that kind."""
    layer, group = homes[name]
    yield group
    yield "one-dimensional" if len(shapes[name]) == 1 else ""
    yield "outside the layers" if layer is None else f"layer {layer}"
    yield "" if layer is None else "inside the layers"
    yield ".".join(name.split(".")[-2:])
    yield f"of shape {' × '.join(map(str, shapes[name]))}"
