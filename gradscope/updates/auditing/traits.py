"""What tokens have in common that no other token of a batch has: all of them, and none of the rest."""

from __future__ import annotations

from itertools import combinations
from math import inf, lgamma, log

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gradscope.updates.auditing.faults import BOUNDS, FAULTS
from gradscope.updates.auditing.readings import Readings
from gradscope.updates.auditing.wording import Trait

CHANCE = 0.01
"""Largest chance that as many tokens, taken at random, would have a trait of those tried to themselves."""
WORDS = {
    "first": "that are the first of their responses",
    "last": "that are the last of their responses",
    "end": "that are end tokens",
    "prompts": "of prompts",
    "dropped": "dropped by the log's mask, such as tool output",
    "positive": "with Â > 0",
    "negative": "with Â < 0",
    "below-clip": "with π/π_old below the clip's range",
    "above-clip": "with π/π_old above the clip's range",
    "outside-clip": "with π/π_old outside the clip's range",
    "inside-clip": "with π/π_old inside the clip's range",
    "truncated": "of responses without an end token",
    "ended": "of responses with an end token",
}
"""A trait → words, after "tokens". Others are token=ID, a part of the batch (micro-batch=2), two joined by "+", and a
bound (length>12)."""
REMEDIES = {name: FAULTS["clip-alone"].remedy for name in ("below-clip", "above-clip", "outside-clip")}
REMEDIES |= {"end": FAULTS["end-token"].remedy, "last": FAULTS["last-token"].remedy}
REMEDIES |= {"first": FAULTS["first-token"].remedy, "dropped": FAULTS["mask-ignored"].remedy}
REMEDIES |= {"prompts": FAULTS["prompt-trained"].remedy}
"""A trait → what to do."""


def find_trait(
    readings: Readings, chosen: Bool[Tensor, " K"], among: Bool[Tensor, " K"], parts: dict[str, Tensor]
) -> Trait | None:
    """Return what the chosen tokens have in common, and no others `among` these; None: nothing that is tried, or two
    tokens are too few to tell. parts: each response's part of the batch, by kind.
    """
    chances = _log_ways(int(among.sum()), int(chosen.sum()))
    ids, response = readings.J.kept(readings.J.batch.input_ids), readings.rows.response
    of_parts = {kind: own[response] for kind, own in parts.items()}
    tried = len(WORDS) + len(ids[among].unique()) + sum(len(own[among].unique()) for own in of_parts.values())
    flags = {name: own for name, own in _flags(readings).items() if own[chosen].all()}
    for kind, column in {"token": ids, **of_parts}.items():
        if len(shared := column[chosen].unique()) == 1:
            flags[f"{kind}={int(shared)}"] = column == shared
    for size, ways in ((1, tried + 2 * len(BOUNDS)), (2, tried**2 / 2)):
        if chances < log(ways / CHANCE):
            return None
        for names in combinations(flags, size):
            own = among.clone()
            for name in names:
                own &= flags[name]
            if torch.equal(own, chosen & among):
                told = " and ".join(_tell(name, readings) for name in names)
                return Trait("+".join(names), told, next(filter(None, map(REMEDIES.get, names)), None))
        if size == 1 and (found := _find_bound(readings, chosen, among)) is not None:
            return found
    return None


def _find_bound(readings: Readings, chosen: Bool[Tensor, " K"], among: Bool[Tensor, " K"]) -> Trait | None:
    """Return the column of BOUNDS beyond some value of which all of the chosen tokens are, and no others."""
    for name, column in readings.bounds():
        inside, outside = column[chosen], column[among & ~chosen]
        if not len(outside):
            return None
        for sign, values, word in ((">", outside.max(), "above"), ("<", outside.min(), "below")):
            beyond = inside.min() > values if sign == ">" else inside.max() < values
            if beyond:
                remedy = FAULTS[f"{name}-{word}"].remedy
                return Trait(
                    f"{name}{sign}{float(values):.4g}", f"where {BOUNDS[name]} is {word} {float(values):.4g}", remedy
                )
    return None


def _flags(readings: Readings) -> dict[str, Bool[Tensor, " K"]]:
    """Return which tokens have each of WORDS."""
    terms, columns, response = readings.terms, readings.columns, readings.rows.response
    found = {"first": terms.ends("first"), "last": terms.ends("last"), "end": terms.end}
    found |= {"prompts": ~terms.inside, "dropped": terms.inside & ~terms.kept}
    found |= {"positive": terms.advantages > 0, "negative": terms.advantages < 0}
    if (ratio := ratios(readings)) is not None and columns.loss.weighting is None:
        found["below-clip"] = ratio < 1 - columns.loss.clip_ratio_low
        found["above-clip"] = ratio > 1 + columns.loss.clip_ratio_high
        found["outside-clip"] = found["below-clip"] | found["above-clip"]
        found["inside-clip"] = ~found["outside-clip"]
    if terms.end.any():
        found["ended"] = torch.isin(response, response[terms.end])
        found["truncated"] = ~found["ended"]
    return found


def ratios(readings: Readings) -> Float[Tensor, " K"] | None:
    """Return π/π_old of every token, NaN where it is not known; None: nowhere."""
    return dict(readings.bounds()).get("ratio")


def _tell(name: str, readings: Readings) -> str:
    kind, _, index = name.partition("=")
    if kind != "token":
        return WORDS.get(name) or f"of {kind} {index}"
    policy = readings.J.policy
    token = "" if policy is None or policy.tokenizer is None else f" ({policy.decode([int(index)])!r})"
    return f"with id {index}{token}"


def _log_ways(many: int, few: int) -> float:
    """Return log of the ways to choose so few of so many; infinite if few are many."""
    return lgamma(many + 1) - lgamma(few + 1) - lgamma(many - few + 1) if 0 < few < many else -inf
