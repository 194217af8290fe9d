"""The single tokens with the largest terms, and what their responses were rewarded with."""

from __future__ import annotations

from math import isnan

import pandas as pd

from gradscope.diagnosis.findings import Finding, Verdict
from gradscope.diagnosis.format import percent
from gradscope.diagnosis.measured import REWARD_PART, Measured
from gradscope.diagnosis.page.page import Block
from gradscope.diagnosis.page.sheets import Sheets, readable
from gradscope.diagnosis.result import Diagnosis
from gradscope.diagnosis.rows import Rows
from gradscope.diagnosis.terms import total_squares, weighted_norms
from gradscope.gradients import PARAMETERS, sampling_probabilities
from gradscope.runs import counted, digits

TITLE = "The largest single tokens"
ASKS = ("table",)
NAMED = 5
"""Number of the largest tokens to name."""


def rows(m: Measured) -> Rows:
    """spikes: the tokens of `largest_tokens`, with their response's reward and its parts (REWARD_PART + name)."""
    if not m.weighted:
        return Rows()
    return Rows(frames={"spikes": largest_tokens(m.table, m.settings.top).join(m.rewards, on="response")})


def largest_tokens(table: pd.DataFrame, n: int) -> pd.DataFrame:
    """Return the n measured tokens with the largest ‖w·g‖, in descending order.

    Columns of the table, then weighted_norm, ‖w·g‖, and squared_share, of `total_squares`.
    """
    norm, whole = weighted_norms(table), total_squares(table)
    columns = ["response", "position", "token", "prob", "entropy", "advantage", "weight", "interval", PARAMETERS]
    chosen = table[[c for c in columns if c in table]].assign(weighted_norm=norm, squared_share=norm**2 / whole)
    return chosen[norm > 0].nlargest(n, "weighted_norm").reset_index(drop=True)


def say(found: Diagnosis) -> list[Finding]:
    """Say how much of the energy the largest tokens hold, and name them."""
    spikes = found.frames.get("spikes")
    if spikes is None or spikes.empty:
        return []
    measured = int(found.table[PARAMETERS].notna().sum())
    together = percent(spikes["squared_share"].sum())
    of = "the gradient energy of all"
    if sampling_probabilities(found.table) is not None:
        of = "the gradient energy, estimated for all tokens"
    these = f"{len(spikes)} of {measured:,} measured tokens with the largest ‖w·g‖"
    if len(spikes) == measured:
        these = f"{measured} measured tokens"
    statement = f"The {these} hold {together} % of {of}."
    statement += _split_rewards(spikes.head(NAMED))
    told = "; ".join(_spike_words(spike) for _, spike in spikes.head(NAMED).iterrows())
    detail = f"The largest: {told}. This describes this batch only."
    return [Finding("spikes", Verdict.FACT, statement, detail, next=_read(spikes))]


def _read(spikes: pd.DataFrame) -> str:
    """Name the tokens that are raised in responses that one part of the reward rewards and another does not."""
    lacking = reward_conflicts(spikes)
    if not lacking.to_numpy().any():
        return ""
    name = lacking.sum().idxmax()
    rows = spikes[lacking[name]]
    tokens = counted(len(rows), "token")
    each = ", ".join(f"{row['token']!r} (response {row['response']})" for _, row in rows.head(NAMED).iterrows())
    return f"Read {tokens} with a reward conflict, raised in responses whose {name} is 0 or less: {each}."


def _split_rewards(spikes: pd.DataFrame) -> str:
    """Say how many of these tokens are raised in responses with some but not all parts of the reward; "": none."""
    lacks = reward_conflicts(spikes)
    if not lacks.to_numpy().any():
        return ""
    name = lacks.sum().idxmax()
    others = [other for other in lacks if (spikes.loc[lacks[name], f"{REWARD_PART}{other}"] > 0).any()]
    count = int(lacks[name].sum())
    are = "is raised in a response" if count == 1 else "are raised in responses"
    earned = f"whose {name} is 0 or less but whose {' or '.join(others)} is positive"
    return f" Of the {len(spikes)} largest, {count} {are} {earned}."


def reward_conflicts(spikes: pd.DataFrame) -> pd.DataFrame:
    """Return, by part of the reward, which tokens are raised in responses that lack it but have another part."""
    parts = spikes[[name for name in spikes if name.startswith(REWARD_PART)]]
    parts = parts.rename(columns=lambda name: name.removeprefix(REWARD_PART))
    raised = (spikes["weight"] > 0) & parts.gt(0).any(axis=1)
    return parts.le(0).mul(raised, axis=0).astype(bool)


def _spike_words(spike: pd.Series) -> str:
    """Name a token, what the update does with it and what its response was rewarded with."""
    pushed = "raised" if spike["weight"] > 0 else "lowered"
    told = f"{spike['token']!r} in response {spike['response']} (π {digits(spike['prob'])}, {pushed}"
    numbers = {name: spike[name] for name in spike.index if name == "reward" or name.startswith(REWARD_PART)}
    known = {name.removeprefix(REWARD_PART): value for name, value in numbers.items() if not isnan(value)}
    told += "".join(f", {name} {digits(value, 3)}" for name, value in known.items())
    return f"{told}; {percent(spike['squared_share'])} %)"


def show(found: Diagnosis, sheets: Sheets) -> list[Block]:
    spikes = found.frames.get("spikes")
    if spikes is None or spikes.empty:
        return []
    measured, whole = int(found.table[PARAMETERS].notna().sum()), found.scope.of_tokens
    of = "in this batch" if measured == whole else f"of the {measured:,} measured ({whole:,} in the batch)"
    caption = f"The tokens with the largest ‖w·g‖ {of}, linked to the viewer."
    shown = ["response", "position", "token", "reward", *(c for c in spikes if c.startswith(REWARD_PART))]
    shown += ["prob", *["advantage"] * (not found.scope.settings.loss.is_whole), "weight"]
    shown += ["param_grad_norm", "weighted_norm", "squared_share"]
    return [sheets.table("spikes", readable(spikes), caption, shown, links=True)]
