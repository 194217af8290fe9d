"""How far the sampler's log π is from the trainer's for the same weights, and what is masked for that reason."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan

import numpy as np
import pandas as pd
from jaxtyping import Float

from gradscope.diagnosis.findings import Finding, Verdict, judge
from gradscope.diagnosis.format import number_words, percent
from gradscope.diagnosis.measured import Measured
from gradscope.diagnosis.page.page import Block
from gradscope.diagnosis.page.sheets import Sheets
from gradscope.diagnosis.result import Diagnosis
from gradscope.diagnosis.rows import Rows, join_rows, make_rows
from gradscope.diagnosis.terms import add_estimated_norms, add_weighted_norms
from gradscope.gradients import LOGITS, PARAMETERS
from gradscope.intervals import summarize_cells
from gradscope.resampling import Resampling, Seed, prompt_clusters
from gradscope.runs import digits
from gradscope.theory import fit_powers

TITLE = "Sampler against trainer"
ASKS = ("table",)
FOLDED = True
LABELS = {
    "mismatch_mean": "mean |Δ log π| of sampler and trainer",
    "mismatch_power": "power of 1 − π of the mismatch",
    "masked_share": "share masked",
    "removed_share": "share of the energy masked",
}


def rows(m: Measured) -> Rows:
    """The rows of `mismatch_rows`; mismatch, its table, if the log has both log-probabilities."""
    batch, uncorrected = m.batch, None
    if batch.uncorrected_advantages is not None:
        scales = 1.0 if batch.loss_scales is None else batch.loss_scales[:, None]
        uncorrected = (batch.uncorrected_advantages * scales)[batch.response_mask].numpy()
    told, table = mismatch_rows(m.table, m.labels, uncorrected=uncorrected, **m.draws("mismatch"))
    return Rows(told, {} if table is None else {"mismatch": table}, unweighted=("mismatch",))


def mismatch_rows(
    table: pd.DataFrame,
    labels: Sequence[str],
    *,
    uncorrected: np.ndarray | None = None,
    seed: Seed = 0,
    resamples: int = 1000,
) -> tuple[pd.DataFrame, pd.DataFrame | None]:
    """Compare the sampler's log π with the trainer's for the same weights, if the log has both.

    d = old_logprob − sampler_logprob, over tokens that have both. Rows: mismatch_mean, the mean |d| in nats for each
    interval and for "all"; mismatch_power, the power of 1 − π that |d| follows (`theory.fit_powers`; an error of the
    logits gives 1). The table has a row per interval and one for all: label, num_tokens, value (mean |d|), lower,
    upper, largest (|d|), ratio (mean e^d); masked_share, the share of tokens that a trainer's masking rule leaves
    without an advantage; removed_share, the gradient energy that the interval's masked tokens would have without the
    rule, as a share of that of all these tokens (norms that were not measured are estimated).

    uncorrected: the tokens' advantages before the rule (`TokenBatch.uncorrected_advantages`), times the loss's scale of
    their response. Without it, masked tokens are those without an advantage in a response where others have one, and
    would have the mean weight of these, relative to the ratio; responses masked as a whole are then not counted.
    Returns no rows and None if no token has both.
    """
    if "sampler_logprob" not in table:
        return join_rows([]), None
    before = np.nan if uncorrected is None else np.where(uncorrected != 0, uncorrected, np.nan)
    table = table.assign(before=before)
    both = table[table["sampler_logprob"].notna() & table["old_logprob"].notna()]
    gap = (both["old_logprob"] - both["sampler_logprob"]).to_numpy(np.float64)
    if not gap.any():  # no token, or one column is the other
        return join_rows([]), None
    if uncorrected is None:
        own = both["policy_weight"].where(both["advantage"] != 0) / np.exp(both["logprob"] - both["old_logprob"])
        both = both.assign(before=own.groupby(both["response"]).transform("mean"))
    masked = (both["before"].notna() & (both["advantage"] == 0)).to_numpy()
    energy = _energy_unmasked(both, masked)
    clusters, parts, resampling = prompt_clusters(both), [], Resampling(seed, resamples=resamples)
    for cells, names in ((both["interval"].to_numpy(np.int64), labels), (np.zeros(len(both), np.int64), ["all"])):
        found = summarize_cells(np.abs(gap), cells, clusters, len(names), resampling=resampling)
        each = {"largest": np.abs(gap), "ratio": np.exp(gap), "masked_share": masked, "removed_share": energy * masked}
        how = {"largest": "max", "ratio": "mean", "masked_share": "mean", "removed_share": "sum"}
        known = pd.DataFrame(each).groupby(cells).agg(how).reindex(range(len(names)))
        parts.append(pd.concat([found.drop(columns="num_measured"), known], axis=1).assign(label=names))
    found = pd.concat(parts, ignore_index=True)
    numbers = found[["value", "lower", "upper"]].to_numpy(np.float64).T
    rows = [make_rows("mismatch_mean", numbers, found["num_tokens"], unit="nats", intervals=[*labels, "all"])]
    seen = np.where(gap != 0, np.abs(gap), np.nan)
    columns = both[["group", "log_one_minus_prob", LOGITS]].assign(**{PARAMETERS: seen})
    if np.isfinite(seen).sum() >= 3:
        fit = fit_powers(columns, seed=seed, resamples=resamples).iloc[-1]
        power = fit[["slope", "slope_lower", "slope_upper"]].to_numpy(np.float64)[:, None]
        rows.append(make_rows("mismatch_power", power, fit["tokens"], unit="ratio"))
    return join_rows(rows), found[["label", *found.columns.drop("label")]]


def _energy_unmasked(table: pd.DataFrame, masked: np.ndarray) -> Float[np.ndarray, " n"]:
    """Return each token's share of the gradient energy, with masked tokens' weights, relative to the ratio, from
    the column `before`."""
    weight = table["weight"].where(~masked, table["before"] * np.exp(table["logprob"] - table["old_logprob"]))
    whole = add_estimated_norms(add_weighted_norms(table.assign(weight=weight)))
    norms = whole["weighted_norm_estimate" if "weighted_norm_estimate" in whole else "weighted_norm"]
    energy = norms.fillna(0.0).to_numpy(np.float64) ** 2
    return energy / energy.sum() if energy.any() else np.full(len(energy), np.nan)


def say(found: Diagnosis) -> list[Finding]:
    """Say how far sampler and trainer differ, by which power of 1 − π, and what is masked for that reason."""
    if (table := found.frames.get("mismatch")) is None:
        return []
    mean, power, whole = found.pick("mismatch_mean", interval="all"), found.pick("mismatch_power"), table.iloc[-1]
    statement = f"The sampler's log π differs from the trainer's by {number_words(mean, 2)} nats on average."
    verdict, tone = Verdict.FACT, "plain"
    about = (("mismatch_mean", "none", "all"), ("mismatch_power", "none", ""))
    if whole["masked_share"] > 0:
        tone = "warn"
        statement += (
            f" {percent(whole['masked_share'])} % of the tokens are masked; with their response's advantage they would "
            f"have about {percent(whole['removed_share'])} % of the gradient energy."
        )
    if power is None or isnan(power["lower"]):
        return [Finding("mismatch", verdict, statement, tone=tone, about=about)]
    verdict = judge(power, 1.0, write=digits)
    detail = f"It grows as 1 − π to the power {number_words(power, 2)}"
    detail += {
        Verdict.MORE: ": steeper than an error in the logits, whose power is 1.",
        Verdict.LESS: ": less steep than an error in the logits, whose power is 1.",
    }.get(verdict, "; an error in the logits has power 1.")
    return [Finding("mismatch", verdict, statement, detail, tone, about=about)]


def show(found: Diagnosis, sheets: Sheets) -> list[Block]:
    if (whole := found.frames.get("mismatch")) is None:
        return []
    caption = "|Δ log π| between sampler and trainer by interval of π, and the mean ratio of trainer to sampler."
    shown = whole.assign(mean=[number_words(row, 2) for _, row in whole.iterrows()])
    shown = shown.drop(columns=["value", "lower", "upper"])
    masks = ["masked_share", "removed_share"] if whole["masked_share"].iat[-1] > 0 else []
    table = sheets.table("mismatch", shown, caption, ["label", "num_tokens", "mean", "largest", "ratio", *masks])
    sheets.tables[table.csv] = whole
    return [table]
