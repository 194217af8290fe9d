"""Words for the tokens, or parts of a batch, that explain the rest of a gradient."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from gradscope.updates.auditing.faults import FAULTS

EQUAL = 0.02
"""Largest difference of two multiples of weights that are called equal."""
SHOWN = 6
"""Most numbers of responses, tokens or multiples in a sentence."""
PARTS = ("response", "prompt", "pair", "micro-batch", "process")
PLURALS = {"micro-batch": "micro-batches", "process": "processes"}
SORTS = {
    "prompts": "of the prompt",
    "dropped": "dropped by the log's mask, such as tool output",
    "first": "first of their responses",
    "last": "last of their responses",
    "sampled": "sampled",
}
KINDS = {
    "first": "the first tokens of all responses",
    "last": "the last tokens of all responses",
    "positive": "the tokens of positive weight",
    "negative": "the tokens of negative weight",
    "dropped": "the tokens that the log's mask drops, such as tool output,",
    "prompts": "the tokens of the prompts",
    "before": "the prompts' last tokens",
}


CLIPPED = {
    "each": "each micro-batch's gradient was clipped to a norm of {norm:.4g} before it was added",
    "sum": "the gradient was clipped to a norm of {norm:.4g} after each micro-batch",
}
CLIP_ONCE = "clip once, after the last micro-batch's backward pass and before the optimizer's step"
MASK = "look which tokens the mask keeps"
SKIPPED = FAULTS["micro-batch-missing"].remedy
TWICE = (
    "look what is read twice: rows repeated to fill up ranks or the last batch (DistributedSampler, verl's "
    "pad_dataproto_to_divisor) must go before the loss; or a backward pass that is repeated"
)
MARGINS = (
    "chosen and rejected agree, but not with their margin: look whether log π_ref is of other pairs, another model or "
    "another mask"
)
CACHED = "keep the log π_ref of a row with it: what was computed before a shuffle must be shuffled, too"


class Trait(NamedTuple):
    """What some tokens have in common, and no others."""

    name: str
    """See `traits.WORDS`."""
    words: str
    """After "tokens"."""
    remedy: str | None
    """What to do; None: it does not say."""


def describe(
    table: pd.DataFrame, base: float = 1.0, trait: Trait | None = None, clip: tuple[str, float] | None = None
) -> tuple[str, str | None]:
    """Return a sentence on the rows of an explanation, and what to do; None: they do not say.

    base: the trainer's weights over the reading's at all other tokens. trait: what the tokens alone have in common.
    """
    if table["kind"].iloc[0] == "decay":
        return (
            f"{table['times'].iloc[0]:.3g} times the weights are added",
            "take decay out of the loss: AdamW has its own",
        )
    tokens, told = table[table["kind"] == "token"], []
    sets = table[~table["kind"].isin(("token", "all"))]
    for (kind, of), rows in sets.groupby(["kind", "of"], sort=False):
        told += _tell_sets(kind, of, rows.assign(times=rows["times"] / base))
    for of, rows in tokens.groupby("of", sort=False):
        times = rows["times"].to_numpy() / base
        # Those that should have no weight, those that have none, and the others.
        apart = [np.isinf(times), (np.abs(times) <= EQUAL) & (trait is None)]
        for some in (*apart, ~apart[0] & ~apart[1]):
            if some.any():
                same = np.isinf(times[some]).all() or np.ptp(times[some]) <= EQUAL * max(1.0, np.abs(times[some]).max())
                how = _have(float(times[some][0]) if same else np.nan, of, several=some.sum() > 1)
                told.append(f"{_name_tokens(rows[some], trait)} {how}")
    if clip is not None:
        how, norm = clip
        return f"{CLIPPED[how].format(norm=norm)} ({'; '.join(told)})", CLIP_ONCE
    return "; ".join(told), _remedy(table, base, trait)


def tell_others(kind: str, others: Mapping[int, int], count: int) -> tuple[str, str]:
    """Return a sentence on parts, of so many, that have others' log π_ref, and what to do; others: whose, by part."""
    pairs = [f"{own} that of {other}" for own, other in others.items()]
    told = ", ".join(pairs[:SHOWN]) + (", …" if len(pairs) > SHOWN else "")
    return f"{len(others)} of {count} {kind}s have log π_ref of another ({told})", CACHED


def _remedy(table: pd.DataFrame, base: float, trait: Trait | None) -> str | None:
    """Return what to do about rows of an explanation, if they say what it may be."""
    if trait is not None and (table["kind"] == "token").all():
        return trait.remedy
    times = table["times"][table["kind"] != "all"].to_numpy() / base
    if np.isinf(times).any():
        return MASK if (np.isinf(times) | (np.abs(times) <= EQUAL)).all() else None
    if not table["kind"].isin(PARTS).any() or (table["of"] != "loss").any():
        return None
    if (np.abs(times) <= EQUAL).all():
        return SKIPPED
    if (np.abs(times - np.round(times)) <= EQUAL).all() and (times > 1).all():
        return TWICE
    return MARGINS if (table["kind"] == "pair").all() else None


def _tell_sets(kind: str, of: str, rows: pd.DataFrame) -> list[str]:
    """Tell what weight sets have: each, or how their weights go with their lengths."""
    if kind in PARTS and len(rows) >= 3 and np.ptp(rows["times"]) > EQUAL:
        counts, times = rows["tokens"].to_numpy(float), rows["times"].to_numpy()
        plural = f"the weights of {len(rows)} {PLURALS.get(kind, f'{kind}s')}"
        for values, words in ((times / counts, ""), (times * counts, "one over ")):
            if np.ptp(values) <= EQUAL * np.abs(values).max():
                return [f"{plural} go with {words}their number of tokens"]
    told = []
    for times, some in rows.groupby(rows["times"].round(2), sort=False):
        several = len(some) > 1 or kind not in PARTS
        told.append(f"{_name_sets(kind, some)} {_have(times, of, several=several)}")
    return told if len(told) <= SHOWN else [*told[:SHOWN], f"and {len(told) - SHOWN} more"]


def _name_sets(kind: str, rows: pd.DataFrame) -> str:
    if kind in PARTS:
        numbers = sorted(rows["index"])
        told = ", ".join(map(str, numbers[:SHOWN])) + (", …" if len(numbers) > SHOWN else "")
        return f"{kind} {told}" if len(numbers) == 1 else f"{len(numbers)} {PLURALS.get(kind, f'{kind}s')} ({told})"
    return KINDS[kind]


def _name_tokens(tokens: pd.DataFrame, trait: Trait | None) -> str:
    """Name tokens, with what they have in common."""
    where = f"{len(tokens)} tokens in {tokens['response'].nunique()} responses"
    if len(tokens) == 1:
        [row] = tokens.itertuples()
        return f"the token {_quote(row)} at position {row.position} of response {row.response} ({SORTS[row.sort]})"
    if trait is not None:
        return f"{where}, all those {trait.words}, and no others,"
    if tokens["response"].nunique() == 1:
        where = f"{len(tokens)} tokens of response {tokens['response'].iloc[0]}"
        if np.ptp(tokens["position"]) + 1 <= 1.5 * len(tokens):
            where += f", from position {tokens['position'].min()} to {tokens['position'].max()}"
    if tokens["sort"].nunique() == 1 and tokens["sort"].iloc[0] != "sampled":
        return f"{where}, all {SORTS[tokens['sort'].iloc[0]]},"
    if tokens["token_id"].nunique() == 1:
        return f"{where}, all {_quote(tokens.iloc[0])},"
    some = ", ".join(f"{_quote(row)} ({row.response}:{row.position})" for row in tokens[:SHOWN].itertuples())
    return f"{where} ({some}{', …' if len(tokens) > SHOWN else ''})"


def _quote(row: Any) -> str:
    """Return a token's text in quotes, or its id alone."""
    return row.token if row.token == f"id {row.token_id}" else repr(row.token)


def _have(times: float, of: str, *, several: bool) -> str:
    """Say what weight something has, as a multiple of the right one; NaN: several multiples."""
    verb = "have" if several else "has"
    weight = "weight" if of == "loss" else "weight of the policy's part"
    if np.isnan(times):
        return f"{verb} other weights than they should have"
    if np.isinf(times):
        return f"{verb} a weight that {'they' if several else 'it'} should not have"
    if abs(times) <= EQUAL:
        return f"{verb} no {weight}"
    if abs(times - 1) <= EQUAL:
        return f"{verb} the weight of all others"
    return f"{verb} {times:.3g} times {'their' if several else 'its'} {weight}"
