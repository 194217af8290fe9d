"""How far the policy is from the one that sampled, and how much of the loss is clipped."""

from __future__ import annotations

from math import isnan

import numpy as np
import pandas as pd

from gradscope.diagnosis.findings import Finding, Verdict
from gradscope.diagnosis.format import number_words, share_words
from gradscope.diagnosis.measured import Measured
from gradscope.diagnosis.page.page import Block
from gradscope.diagnosis.page.sheets import Sheets, define
from gradscope.diagnosis.result import Diagnosis
from gradscope.diagnosis.rows import Rows, join_rows, make_rows, one_row
from gradscope.intervals import summarize_cells
from gradscope.objective import LossSettings, off_policy_sentence, off_policyness
from gradscope.resampling import Resampling, Seed, prompt_clusters
from gradscope.runs import counted

TITLE = "Distance from the policy that sampled"
ASKS = ("table",)
FOLDED = True
LABELS = {
    "logprob_difference_mean": "mean |Δ log π|",
    "logprob_difference_max": "largest |Δ log π|",
    "ratio_mean": "mean π/π_old",
    "ratio_max": "largest π/π_old",
    "clip_low": "clipped low",
    "clip_high": "clipped high",
    "clip_dual": "clipped by the dual clip",
}
DEFINITIONS = {
    "off-policy": (
        "|log π − log π_old| in nats between this policy and the one that sampled, over tokens whose log π_old is in "
        "the rollouts. Clipped low: Â < 0 and π/π_old < 1 − ε_low; clipped high: Â > 0 and π/π_old > 1 + ε_high; as "
        "shares of these tokens."
    ),
}


def rows(m: Measured) -> Rows:
    """The rows of `lag_rows`; none of text that no policy sampled."""
    if not m.settings.loss.is_sampled:
        return Rows()
    # A log with its loss has all that went into it: without old log-probabilities, the ratio was 1.
    logged = m.batch.old_logprobs is None and any(note.kind == "loss" for note in m.batch.notes)
    if m.table["old_logprob"].isna().any() and not logged:
        m.note("on-policy", "Some or all old log-probabilities are unknown; these tokens count as on-policy.")
    told = lag_rows(m.table, m.settings.loss, **m.draws("off_policy"))
    return Rows(told, unweighted=("logprob_difference_mean", "ratio_mean"))


def lag_rows(table: pd.DataFrame, loss: LossSettings, *, seed: Seed = 0, resamples: int = 1000) -> pd.DataFrame:
    """Compare the policy with the one that sampled, over tokens with a known old_logprob.

    logprob_difference_mean, _max: of |log π − log π_old| in nats, as trainers log it for the mismatch between trainer
    and sampler; ratio_mean, ratio_max: of π/π_old; clip_low, clip_high, clip_dual: shares of tokens cut by the trust
    region of Eq. 2 (`off_policyness`), if Â is known.
    """
    known = table["old_logprob"].notna().to_numpy()
    if not known.any():
        return join_rows([])
    own = table[known]
    found = off_policyness(own, loss)
    gap, ratio = found.pop("logprob_difference"), found.pop("ratio")
    values = {"logprob_difference_mean": (gap, "nats"), "ratio_mean": (ratio, "ratio")}
    values |= {name: (inside, "share") for name, inside in found.items()}
    clusters, parts, resampling = prompt_clusters(own), [], Resampling(seed, resamples=resamples)
    for name, (numbers, unit) in values.items():
        row = summarize_cells(numbers, np.zeros(len(own), dtype=np.int64), clusters, 1, resampling=resampling).iloc[0]
        found = row[["value", "lower", "upper"]].to_numpy(np.float64)[:, None]
        parts.append(make_rows(name, found, int(row["num_measured"]), unit=unit))
    worst = (("logprob_difference_max", gap.max(), "nats"), ("ratio_max", ratio.max(), "ratio"))
    return join_rows([*parts, *(one_row(name, value, len(own), unit=unit) for name, value, unit in worst)])


def say(found: Diagnosis) -> list[Finding]:
    """Say how far the policy is from the one that sampled, and how much is clipped."""
    mean, worst = found.pick("logprob_difference_mean"), found.pick("logprob_difference_max")
    if mean is None:
        return []
    low, high, dual = (found.pick(f"clip_{name}") for name in ("low", "high", "dual"))
    about = (("logprob_difference_mean", "none", ""), ("logprob_difference_max", "none", ""))
    statement = off_policy_sentence(number_words(mean, 2), worst["value"])
    if isnan(low["value"]):
        return [Finding("lag", Verdict.FACT, statement, f"Over {counted(mean['n'], 'token')}.", about=about)]
    detail = (
        f"Of {counted(low['n'], 'token')}, clipped low {share_words(low)}, clipped high {share_words(high)}, "
        "by the dual clip "
    )
    return [Finding("lag", Verdict.FACT, statement, f"{detail}{share_words(dual)}.", about=about)]


def show(found: Diagnosis, sheets: Sheets) -> list[Block]:
    rows = found.rows["off_policy"].rows
    if rows.empty:
        return []
    write = {"share": share_words}
    told = [write.get(row["unit"], number_words)(row) for _, row in rows.iterrows()]
    frame = pd.DataFrame({"statistic": rows["statistic"].map(sheets.label_of), "value": told, "unit": rows["unit"]})
    return [sheets.table("off_policy", frame, "Over the tokens whose log π_old is known."), *define(DEFINITIONS)]
