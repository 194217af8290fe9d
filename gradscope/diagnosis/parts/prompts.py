"""Which prompts drive the summed gradient, which point against the rest, and whether one holds most of the energy."""

from __future__ import annotations

from math import nan

import numpy as np
import pandas as pd

from gradscope.diagnosis.findings import Finding, Verdict
from gradscope.diagnosis.format import percent
from gradscope.diagnosis.measured import Measured
from gradscope.diagnosis.page.page import Block, Paragraph
from gradscope.diagnosis.page.sheets import Sheets
from gradscope.diagnosis.result import Diagnosis
from gradscope.diagnosis.rows import Rows
from gradscope.diagnosis.sums import prompt_table
from gradscope.diagnosis.terms import scaled_squares
from gradscope.resampling import FEWEST
from gradscope.rollouts import TokenBatch
from gradscope.runs import counted

TITLE = "Prompt by prompt"
ASKS = ("table", "sums")
EXTREMES = 3
"""Prompts shown at each end."""
CONCENTRATED = 0.25
"""Share of the gradient energy above which a single prompt is mentioned."""


def rows(m: Measured) -> Rows:
    """by_prompt: a row per prompt with a summed gradient (`sums.prompt_table`), with its rollouts' numbers."""
    if "sums" not in m.made:
        return Rows()
    return Rows(frames={"by_prompt": add_rollouts(prompt_table(m.made["sums"].raw), m.table, m.batch)})


def add_rollouts(prompts: pd.DataFrame, table: pd.DataFrame, batch: TokenBatch) -> pd.DataFrame:
    """Add columns on the rollouts of each prompt to a `prompt_table`.

    Columns: responses, the number with tokens; tokens; reward, the mean over its responses, if known; and response and
    position of the token with the largest |w|·(1 − π), which a page links to.
    """
    amounts = (table["weight"] * np.exp(table["log_one_minus_prob"])).abs()
    first = table.loc[amounts.groupby(table["group"]).idxmax(), ["group", "response", "position"]]
    sizes = table.groupby("group").agg(responses=("response", "nunique"), tokens=("response", "size"))
    found = prompts.merge(sizes.reset_index(), on="group", how="left")
    if batch.rewards is not None:
        rewards = pd.Series(batch.rewards.double().numpy()).groupby(batch.group_ids.numpy()).mean()
        found["reward"] = found["group"].map(rewards)
    return found.merge(first, on="group", how="left")


def carriers(shares: pd.Series, part: float = 0.5) -> int:
    """Return the least number of prompts whose shares sum to at least `part`; all shares sum to 1.

    >>> carriers(pd.Series([0.4, 0.3, 0.3, 0.2, -0.2]))
    2
    """
    return int((shares.sort_values(ascending=False).cumsum() < part).sum()) + 1


def say(found: Diagnosis) -> list[Finding]:
    """Say if one prompt holds much of the energy, in which case resampling prompts says little."""
    if found.table is None or found.scope.supply.too_few:
        return []
    by_prompt = pd.Series(scaled_squares(found.table)).groupby(found.table["group"].to_numpy()).sum()
    share = by_prompt.max() / by_prompt.sum() if by_prompt.sum() > 0 else nan
    if not (share >= CONCENTRATED and len(by_prompt) >= FEWEST):
        return []
    statement = f"One of {len(by_prompt):,} prompts holds {percent(share)} % of the gradient energy."
    detail = (
        f"Prompt {by_prompt.idxmax()}. This makes bounds over prompts wide: whether another batch has such a prompt "
        "cannot be seen from this one."
    )
    return [Finding("concentration", Verdict.FACT, statement, detail, "warn")]


def show(found: Diagnosis, sheets: Sheets) -> list[Block]:
    whole = found.frames.get("by_prompt")
    if whole is None or len(whole) < 2 or whole["gradient_share"].isna().any():
        return []
    live = whole[whole["gradient_norm"] > 0]
    if len(live) < 2:
        return []
    half = carriers(live["gradient_share"])
    opposed = live[live["cosine_with_rest"] < 0].sort_values("cosine_with_rest", kind="stable")["group"].tolist()
    told = f"Half of the summed gradient comes from {half:,} of {counted(len(live), 'prompt')}"
    told += "." if len(live) == len(whole) else f" with a gradient; {len(whole) - len(live):,} more have none."
    if opposed:
        names = ", ".join(map(str, opposed[:EXTREMES])) + (", …" if len(opposed) > EXTREMES else "")
        told += (
            f" {len(opposed):,} point{'s' if len(opposed) == 1 else ''} against the rest ({names}); if all gradients "
            "were noise, about half of them would."
        )
    extremes = live
    if len(live) > 2 * EXTREMES:
        least = live.iloc[EXTREMES:].nsmallest(EXTREMES, "cosine_with_rest")
        extremes = pd.concat([live.head(EXTREMES), least[::-1]])
    caption = "The prompts that drive the update most"
    caption += (
        "" if extremes is live else f", and the {EXTREMES} whose gradients agree least with the rest or oppose it"
    )
    caption += ", each linked to its token with the largest |w|·(1−π)."
    if (live["share_error"] > 0).any():
        caption += f" Shares have a standard error of at most {percent(live['share_error'].max())} % from sketching."
    shown = ["group", "reward", "responses", "tokens", "gradient_norm", "gradient_share", "cosine_with_rest"]
    table = sheets.table("prompts", extremes, caption, shown, links=True)
    sheets.tables[table.csv] = whole
    return [Paragraph(told), table]
