"""Where the gradient energy is: by kind of token, position and length of the response, and whether in one prompt."""

from __future__ import annotations

from collections.abc import Set
from math import nan

import numpy as np
import pandas as pd

from gradscope.diagnosis.findings import Finding, Verdict, judge
from gradscope.diagnosis.format import drop_vacuous, percent, share_bounds, share_words
from gradscope.diagnosis.measured import Measured
from gradscope.diagnosis.page.page import Block
from gradscope.diagnosis.page.sheets import DATA, Sheets
from gradscope.diagnosis.result import Diagnosis
from gradscope.diagnosis.rows import Rows
from gradscope.diagnosis.shares import group_shares
from gradscope.diagnosis.terms import scaled_squares
from gradscope.plots import make_series
from gradscope.resampling import FEWEST, Seed
from gradscope.theory import add_drivers

TITLE = "Kinds of tokens and positions"
ASKS = ("table",)
FOLDED = True
PRINTABLE = 10
"""Fewest measured tokens for a kind of token to have its own row."""
OTHER = "other"
KINDS = {"token_class": "kind of token", "position_class": "position", "length_class": "response length"}
"""Drivers that are drawn."""
JUDGED = {"token_class": "kind of token", "position_class": "position in the response"}
CONCENTRATED = 0.25
"""Share of the gradient energy above which a single prompt is mentioned."""
SERIES = (("token", "of the tokens", 0), ("squared", "of the gradient energy", 2))
"""Prefix of the columns, words and look."""


def rows(m: Measured) -> Rows:
    """where: the table of `shares_by`; nothing without an update."""
    if not m.weighted:
        return Rows()
    special = frozenset(getattr(m.policy.tokenizer, "all_special_tokens", ()))
    return Rows(frames={"where": shares_by(m.table, classes=m.settings.classes, special=special, **m.draws("where"))})


def shares_by(
    table: pd.DataFrame,
    *,
    classes: int = 4,
    special: Set[str] = frozenset(),
    seed: Seed = 0,
    resamples: int = 1000,
) -> pd.DataFrame:
    """Compute shares of Σ‖w·g‖²: a row per value of each driver of `add_drivers`.

    Columns: driver, value; num_tokens, token_share, token_lower, token_upper; num_measured, squared_share,
    squared_lower, squared_upper. Bounds are simultaneous 95 % bounds on all of a driver's shares, since the largest is
    picked. Measured tokens are scaled as in `scaled_squares`. Square columns are NaN if weights or norms are unknown.
    special: the tokenizer's special tokens, as decoded.

    A row has at least `PRINTABLE` measured tokens: rarer kinds become "other", and the number of classes is reduced.
    """
    squares = scaled_squares(table)
    classes = max(1, min(classes, int(np.isfinite(squares).sum()) // PRINTABLE))
    table = add_drivers(table, classes=classes, special=special)
    parts = []
    for driver in ("token_class", "position_class", "length_class", "entropy_class", "advantage_sign", "teacher_class"):
        if driver not in table:
            continue
        column = table[driver].astype("category").cat.remove_unused_categories()
        if driver == "token_class":
            few = column[np.isfinite(squares)].value_counts() < PRINTABLE
            column = column.astype(object).replace(dict.fromkeys(few.index[few], OTHER)).astype("category")
        if len(names := column.cat.categories):
            shares = group_shares(table, column.cat.codes.to_numpy(), names, seed=seed, resamples=resamples)
            parts.append(shares.assign(driver=driver)[["driver", *shares]])
    return pd.concat(parts, ignore_index=True)


def say(found: Diagnosis) -> list[Finding]:
    """Say which kinds of tokens and positions have more gradient energy than in proportion to their tokens."""
    if found.table is None or found.scope.supply.too_few:
        return []
    where, said = found.frames.get("where"), _concentration(found)
    if where is None:
        return said
    for driver, words in JUDGED.items():
        rows = where[(where["driver"] == driver) & where["squared_share"].notna()]
        if len(rows) < 2 or rows["squared_lower"].isna().all():
            continue
        told = {r["value"]: [_one_of(r, of) for of in ("squared", "token")] for _, r in rows.iterrows()}
        each = "; ".join(
            f"{name}: {share_words(energy)} ({share_words(tokens)} of the tokens)"
            for name, (energy, tokens) in told.items()
        )
        over = "; ".join(
            f"{name}, {share_bounds(energy)} against {share_bounds(tokens)}"
            for name, (energy, tokens) in told.items()
            if judge(energy, tokens) is Verdict.MORE
        )
        statement = f"No {words} accounts for detectably more gradient energy than its share of the tokens."
        if over:
            statement = f"By {words}, more gradient energy than in proportion to the tokens: {over}."
        detail = f"Share of the gradient energy, with joint 95 % bounds for all {len(told)}: {each}."
        said.append(Finding(f"where_{driver}", Verdict.MORE if over else Verdict.UNDECIDED, statement, detail))
    return said


def _concentration(d: Diagnosis) -> list[Finding]:
    """Say if one prompt holds much of the energy, in which case resampling prompts says little."""
    by_prompt = pd.Series(scaled_squares(d.table)).groupby(d.table["group"].to_numpy()).sum()
    share = by_prompt.max() / by_prompt.sum() if by_prompt.sum() > 0 else nan
    if not (share >= CONCENTRATED and len(by_prompt) >= FEWEST):
        return []
    statement = f"One of {len(by_prompt):,} prompts holds {percent(share)} % of the gradient energy."
    detail = (
        f"Prompt {by_prompt.idxmax()}. This makes bounds over prompts wide: whether another batch has such a prompt "
        "cannot be seen from this one."
    )
    return [Finding("concentration", Verdict.FACT, statement, detail, "warn")]


def _one_of(row: pd.Series, of: str) -> pd.Series:
    """Return the share `of` tokens or squares in a row of the table, with its bounds."""
    bounds = {"value": "share", "lower": "lower", "upper": "upper"}
    return pd.Series({name: row[f"{of}_{end}"] for name, end in bounds.items()})


def show(found: Diagnosis, sheets: Sheets) -> list[Block]:
    if (where := found.frames.get("where")) is None:
        return []
    sheets.tables[f"{DATA}/where.csv"], blocks = where, []
    for driver, words in KINDS.items():
        rows = where[where["driver"] == driver]
        if len(rows) < 2:  # one class alone is all of the batch
            continue
        rows = rows.assign(at=[f"{r.value} ({r.num_tokens:,})" for r in rows.itertuples()])
        names = {"share": "value", "lower": "lower", "upper": "upper"}
        series = []
        for of, said, look in SERIES:
            own = rows.drop(columns="value").rename(columns={f"{of}_{end}": name for end, name in names.items()})
            series.append(make_series(drop_vacuous(own), rows["at"].tolist(), said, look, factor=100.0))
        caption = f"Shares by {words}: of the tokens and of the gradient energy."
        look = {"ylabel": "share (%)", "xlabel": words, "lying": True}
        bars = "95 % for all together"
        blocks.append(sheets.series(f"where_{driver}", pd.concat(series), caption, bars=bars, **look))
    return blocks
