"""Words for the tokens, or parts of a batch, that explain the rest of a gradient."""

from __future__ import annotations

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool
from torch import Tensor

from gradscope.updates.auditing.faults import BOUNDS
from gradscope.updates.auditing.readings import Readings

EQUAL = 0.02
"""Largest difference of two multiples of weights that are called equal."""
SHOWN = 6
"""Most numbers of responses, tokens or multiples in a sentence."""
PARTS = ("response", "prompt", "micro-batch", "process")
PLURALS = {"micro-batch": "micro-batches", "process": "processes"}
SORTS = {
    "prompts": "of the prompt",
    "dropped": "dropped by the log's mask, such as tool output",
    "first": "first of their responses",
    "last": "last of their responses",
    "sampled": "sampled",
}
KINDS = {
    "all": "all other tokens",
    "first": "the first tokens of all responses",
    "last": "the last tokens of all responses",
    "positive": "the tokens of positive weight",
    "negative": "the tokens of negative weight",
    "dropped": "the tokens that the log's mask drops, such as tool output,",
    "prompts": "the tokens of the prompts",
    "before": "the prompts' last tokens",
}


def describe(table: pd.DataFrame, readings: Readings, live: Bool[Tensor, " K"]) -> tuple[str, str]:
    """Return a sentence on the rows of an explanation, and what to do. live: tokens that have a weight."""
    if table["kind"].iloc[0] == "decay":
        return (
            f"{table['times'].iloc[0]:.3g} times the weights are added",
            "take decay out of the loss: AdamW has its own",
        )
    tokens, told = table[table["kind"] == "token"], []
    for (kind, of), rows in table[table["kind"] != "token"].groupby(["kind", "of"], sort=False):
        told += _tell_sets(kind, of, rows)
    for of, rows in tokens.groupby("of", sort=False):
        times = rows["times"].to_numpy()
        same = np.isinf(times).all() or np.ptp(times) <= EQUAL * max(1.0, np.abs(times).max())
        how = _have(float(times[0]) if same else np.nan, of, several=len(rows) > 1)
        told.append(f"{_name_tokens(rows, readings, live)} {how}")
    unwanted = np.isinf(table["times"]).all()
    return "; ".join(told), "look which tokens the mask keeps" if unwanted else "look what is skipped or doubled"


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
    if kind in KINDS:
        return KINDS[kind]
    quarter = int(kind[-1])
    return f"the tokens with π from {quarter / 4:g} to {(quarter + 1) / 4:g}"


def _name_tokens(tokens: pd.DataFrame, readings: Readings, live: Bool[Tensor, " K"]) -> str:
    """Name tokens, with what they have in common."""
    where = f"{len(tokens)} tokens in {tokens['response'].nunique()} responses"
    if len(tokens) == 1:
        [row] = tokens.itertuples()
        return f"the token {row.token!r} at position {row.position} of response {row.response} ({SORTS[row.sort]})"
    if tokens["response"].nunique() == 1:
        where = f"{len(tokens)} tokens of response {tokens['response'].iloc[0]}"
        if np.ptp(tokens["position"]) + 1 <= 1.5 * len(tokens):
            where += f", from position {tokens['position'].min()} to {tokens['position'].max()}"
    if tokens["sort"].nunique() == 1 and tokens["sort"].iloc[0] != "sampled":
        return f"{where}, all {SORTS[tokens['sort'].iloc[0]]},"
    if tokens["token_id"].nunique() == 1:
        return f"{where}, all {tokens['token'].iloc[0]!r},"
    chosen = torch.zeros(len(live), dtype=torch.bool)
    chosen[torch.tensor(tokens["index"].tolist())] = True
    for name, column in readings.bounds():
        inside, outside = column[chosen], column[live & ~chosen]
        if len(outside) and inside.min() > outside.max():
            return f"{where}, all those where {BOUNDS[name]} is above {float(outside.max()):.4g},"
        if len(outside) and inside.max() < outside.min():
            return f"{where}, all those where {BOUNDS[name]} is below {float(outside.min()):.4g},"
    some = ", ".join(f"{row.token!r} ({row.response}:{row.position})" for row in tokens[:SHOWN].itertuples())
    return f"{where} ({some}{', …' if len(tokens) > SHOWN else ''})"


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
    return f"{verb} {times:.3g} times {'their' if several else 'its'} {weight}"
