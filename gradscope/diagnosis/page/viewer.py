"""Data of the token viewer: each response's tokens as text, and the numbers to shade them by."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from gradscope.diagnosis.page.quantities import QUANTITIES, Quantity
from gradscope.errors import InputError
from gradscope.rollouts import TokenBatch
from gradscope.runs import counted

DECADES = 4
"""Decades of a logarithmic scale; smaller values are shown as its lower end."""
EXTREME = 0.002
"""Share of tokens that may exceed a scale, so that outliers do not wash out the rest."""
RANKS, MARKED = 100, 0.05
"""Steps of a ranked scale, and the share of the tokens, the largest, that it marks."""


@dataclass(frozen=True)
class Viewer:
    table: pd.DataFrame
    """A token table, with any further columns that `quantities` names; responses of one `group` are siblings."""
    prompts: Sequence[str] | None = None
    """The prompt of each row of the rollouts (the table's `response` counts them), as `prompt_texts` gives them."""
    rewards: Sequence[int | float] | None = None
    """The reward of each row of the rollouts."""
    reward_parts: Mapping[str, Sequence[int | float]] = field(default_factory=dict)
    """Further numbers of each row, such as each reward function's."""
    quantities: tuple[Quantity, ...] = QUANTITIES
    """Quantities whose column is absent or all NaN are left out."""
    shade: str = "prob"
    """Column to shade by initially, if the table has it."""
    first: int | None = None
    """Response to open initially; None: the first one."""
    needed: Sequence[int] = ()
    """Responses to show even beyond the budget, such as those that the page links to."""
    budget: int = 12_000_000
    """Bytes of data in the page; as many responses as fit are shown, at least one."""

    @property
    def invitation(self) -> str:
        """Text of the link to the viewer."""
        named = next((quantity.label for quantity in self.quantities if quantity.column == self.shade), None)
        shaded = "" if named is None else f", shaded by {named}"
        return f"Read {'the responses' if self.first is None else f'response {self.first}'} token by token{shaded}"


@dataclass(frozen=True)
class ViewerData:
    """A Viewer as encoded for the page."""

    json: str
    """JSON for a script element: ASCII only, without <, > or &."""
    quantities: tuple[Quantity, ...]
    shown: int
    """Number of responses in `json`: those needed, and the first of the others."""
    responses: int
    """Number of responses in the table."""
    tokens: int
    """Number of tokens in `json`."""

    @property
    def sentence(self) -> str:
        """How many of the responses are shown, and why not more."""
        tokens, responses = counted(self.tokens, "token"), counted(self.responses, "response")
        if self.shown == self.responses:
            return f"All {responses}, {tokens}."
        return f"{self.shown:,} of {responses}, {tokens}; more would make this page too large."


def viewer_data(viewer: Viewer) -> ViewerData:
    """Encode as many responses as the budget allows.

    Numbers are float32, as in a token table. Scales span the whole table, so that a shade means the same in every
    response. Raises InputError if the table lacks `response`, `position` or `token`, has no row, or has none of the
    quantities, and for prompts or rewards that do not fit it.
    """
    table = _checked(viewer)
    quantities = tuple(q for q in viewer.quantities if q.column in table and np.isfinite(table[q.column]).any())
    if not quantities:
        raise InputError("the token table has no column to shade tokens by; measure it, or name other quantities")
    parts = {int(response): part for response, part in table.groupby("response", sort=False)}
    tokens: dict[str, int] = {}  # distinct texts, numbered
    prompts: dict[str, int] = {}
    shown: dict[int, str] = {}
    needed, budget = [response for response in dict.fromkeys(viewer.needed) if response in parts], viewer.budget
    for response in dict.fromkeys((*needed, *parts)):
        known = len(tokens), len(prompts)
        encoded = json.dumps(_encode_response(viewer, parts[response], response, quantities, tokens, prompts))
        new = [*tokens][known[0] :] + [*prompts][known[1] :]
        budget -= len(encoded) + len(json.dumps(new))
        if shown and budget < 0 and response not in needed:
            break
        shown[response] = encoded
    head = {
        "quantities": [_describe(quantity, table[quantity.column]) for quantity in quantities],
        "shade": next((place for place, q in enumerate(quantities) if q.column == viewer.shade), 0),
        "first": viewer.first,
        "tokens": [*tokens],
        "prompts": [*prompts],
    }
    listed = ", ".join(shown[response] for response in parts if response in shown)
    text = f'{json.dumps(head)[:-1]}, "responses": [{listed}]}}'
    count = sum(len(parts[response]) for response in shown)
    return ViewerData(_for_script(text), quantities, len(shown), len(parts), count)


def prompt_texts(batch: TokenBatch, tokenizer: Any) -> list[str]:
    """Decode the prompt of every response, special tokens included."""
    positions = batch.positions()
    before = [(batch.attention_mask[row] & (positions[row] < 0)) for row in range(len(batch))]
    return [tokenizer.decode(batch.input_ids[row][kept].tolist()) for row, kept in enumerate(before)]


def _checked(viewer: Viewer) -> pd.DataFrame:
    """Check the viewer's table and sort it by position within each response."""
    table = viewer.table
    if missing := [name for name in ("response", "position", "token") if name not in table.columns]:
        raise InputError(f"the token table has no column {', '.join(missing)}, which the viewer shows; measure again")
    if table.empty:
        raise InputError("the token table has no rows; the viewer needs at least one; measure a response first")
    last = int(table["response"].max())
    for name, values in (("prompts", viewer.prompts), ("rewards", viewer.rewards), *viewer.reward_parts.items()):
        if values is not None and len(values) <= last:
            raise InputError(
                f"{name} has {len(values)} entries, and the token table has response {last}; give one per row of the "
                "rollouts"
            )
    order = table.groupby("response", sort=False).ngroup().to_numpy()
    return table.iloc[np.lexsort((table["position"].to_numpy(), order))]


def _encode_response(
    viewer: Viewer, part: pd.DataFrame, response: int, quantities: Sequence[Quantity], *texts: dict[str, int]
) -> dict[str, Any]:
    """Encode one response: its tokens' numbers, where positions jump, and each quantity as base64 of float32.

    texts: the numbers of distinct tokens and prompts, to which new ones are added.
    """
    (tokens, prompts), positions = texts, part["position"].to_numpy(dtype=np.int64)
    jumps = np.flatnonzero(np.diff(positions, prepend=-1) != 1)
    encoded: dict[str, Any] = {
        "response": response,
        "tokens": [tokens.setdefault(str(token), len(tokens)) for token in part["token"]],
        "jumps": [[int(at), int(positions[at])] for at in jumps],
        "values": [base64.b64encode(part[q.column].to_numpy("<f4").tobytes()).decode("ascii") for q in quantities],
    }
    if "group" in part:
        encoded["group"] = int(part["group"].iat[0])
    if viewer.prompts is not None:
        encoded["prompt"] = prompts.setdefault(str(viewer.prompts[response]), len(prompts))
    if viewer.rewards is not None and np.isfinite(viewer.rewards[response]):
        encoded["reward"] = float(viewer.rewards[response])
    parts = {name: float(values[response]) for name, values in viewer.reward_parts.items()}
    if known := {name: value for name, value in parts.items() if np.isfinite(value)}:
        encoded["parts"] = known
    return encoded


def _describe(quantity: Quantity, column: pd.Series) -> dict[str, Any]:
    """Describe a quantity and its scale. ranks: quantiles of its size, from the smallest to the largest."""
    values = column.to_numpy(dtype=np.float64)
    low, high = quantity.limits or _limits(quantity, values)
    names = ("column", "label", "scale", "unit", "definition", "reverse", "missing")
    known, ranks = {name: getattr(quantity, name) for name in names} | {"low": low, "high": high}, None
    if quantity.scale == "ranked":
        ranks = np.quantile(np.abs(values[np.isfinite(values)]), np.linspace(0, 1, RANKS + 1)).tolist()
    return known | {"ranks": ranks, "mark": None if ranks is None else ranks[-1 - round(RANKS * MARKED)]}


def _limits(quantity: Quantity, values: np.ndarray) -> tuple[float, float]:
    """Return a scale's ends, beyond which at most EXTREME of the tokens lie; a linear scale contains 0."""
    values = values[np.isfinite(values)]
    if quantity.scale in ("diverging", "ranked"):
        level = 1 - EXTREME if quantity.scale == "diverging" else 1.0
        reach = float(np.quantile(np.abs(values), level, method="higher")) or 1.0
        return -reach, reach
    if quantity.scale == "log":
        values = values[values > 0] if (values > 0).any() else np.ones(1)
        high = float(np.quantile(values, 1 - EXTREME, method="higher"))
        return min(max(float(values.min()), high * 10.0**-DECADES), high / 2), high
    low, high = map(float, np.quantile(values, [EXTREME, 1 - EXTREME]))
    low, high = min(low, 0.0), max(high, 0.0)
    return low, high if low < high else 1.0


def _for_script(text: str) -> str:
    """Encode JSON so that no HTML parser sees markup: only strings can hold these characters."""
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text
