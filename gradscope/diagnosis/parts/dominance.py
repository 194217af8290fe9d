"""Shares of the tokens and of their gradient energy by interval of π, and what (1−π)² alone would predict."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import ceil, inf, isnan

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from gradscope.diagnosis.findings import Finding, Verdict, judge, lack_words
from gradscope.diagnosis.format import percent, says_nothing, share_words, times, times_words
from gradscope.diagnosis.measured import Measured
from gradscope.diagnosis.page.first_screen import shares_words
from gradscope.diagnosis.page.page import Block
from gradscope.diagnosis.page.sheets import OVER_PROMPTS, Sheets, define, series_of
from gradscope.diagnosis.precision import sampling_error
from gradscope.diagnosis.result import Diagnosis
from gradscope.diagnosis.rows import Rows, join_rows, make_rows, one_row
from gradscope.diagnosis.shares import sum_by_prompt, token_shares
from gradscope.diagnosis.terms import total_squares, weighted_norms
from gradscope.gradients import ADAMW
from gradscope.intervals import name_interval
from gradscope.plots import plot_series
from gradscope.resampling import Supply
from gradscope.runs import counted

TITLE = "Shares by probability interval"
ASKS = ("table",)
FOLLOWED = {
    ("token_share", "none"): ("share of the tokens", "The share of the tokens with {}"),
    ("squared_share", "raw"): ("share of the gradient energy", "The share of the gradient energy of tokens with {}"),
    ("dominance_index", "raw"): ("dominance index (bits)", "The energy of a token with {} over the average"),
    ("added_index", "raw"): (
        "measured over predicted (bits)",
        "The gradient energy of tokens with {} over what (1−π)² alone predicts",
    ),
}
LABELS = {
    "prompts": "prompts with an advantage",
    "largest_share": "has the largest share, odds",
    "predicted_share": "share that (1−π)² alone predicts",
    "predicted_index": "index that (1−π)² alone predicts",
    "added_index": "measured over predicted by (1−π)²",
}
OWN_WEIGHT = "The weight of a token in the loss's gradient: −N·∂loss/∂ log π, N being the number of tokens."
DEFINITIONS = {
    "probability interval": (
        "Response tokens are grouped by π, the policy's probability of the token at the sampling temperature, into "
        "intervals with fixed edges (not quantiles): π < ¼, ¼ ≤ π < ½, ½ ≤ π < ¾ and π ≥ ¾ unless others are shown."
    ),
    "share of the tokens": "The fraction of all response tokens that are in the interval.",
    "w": (
        "The weight of a token in the loss's gradient (Eq. 2 of the paper): the clipped ratio times the advantage, "
        "plus the KL term's contribution. If a group's rewards are all equal, only the KL contribution is left."
    ),
    "gradient energy": (
        "Σ‖w·g‖², where g is the gradient of a single token's log π with respect to all parameters (or those of an "
        "adapter, if only that is measured), and w the token's weight in the loss. An interval's share is its sum of "
        "squared norms divided by the sum over all tokens. It measures the size of individual gradients, and ignores "
        "that gradients can cancel."
    ),
    "dominance index": (
        "log₂ of an interval's share of the gradient energy over its share of the tokens, in bits: 0 means "
        "proportional, +1 twice and −1 half the average per token. Tokens dominate only if both its 95 % bounds "
        "lie above 0 and their interval has the largest share in 95 % of the redrawn batches."
    ),
    "redrawn batches": (
        "Batches with the same number of prompts, drawn with replacement from those given (a bootstrap). How often a "
        "ranking holds in them shows how much it depends on the choice of prompts; below 95 %, it is called undecided."
    ),
    "(1−π)² alone": (
        "The gradient energy with ‖w·g‖ replaced by |w|·(1−π), as if the network scaled all tokens' gradients "
        "equally: the prediction from probabilities and weights alone."
    ),
    "AdamW-preconditioned": (
        "Gradients divided entry by entry by √v̂ + eps, as in the optimizer's next update, with v̂ of the whole step. "
        "Momentum from earlier steps and weight decay are left out."
    ),
    "95 % bounds": (
        "Brackets hold percentiles of a bootstrap over prompts or, below 50 prompts or with a sample of tokens, a "
        "jackknife over prompts; for summed gradients they are corrected for resampling bias, and for signal they are "
        "always a jackknife. They show how much the choice of prompts and measured tokens matters; if there are too "
        "few of either, none is given."
    ),
}
CERTAIN = 0.95
"""Share of the resampled batches in which a ranking must hold to be stated."""
MOST_PROMPTS = 100
"""Largest number of prompts stated to decide a ranking, as a multiple of those present; more would be a guess."""
HELD = 0.25
"""Share of the gradient energy above which a single token is named as the reason of bounds that say nothing."""
ENERGY = {"raw": "gradient energy", "adamw": "AdamW-preconditioned gradient energy"}
SHARES = (
    ("token_share", "none", "of the tokens", 0), ("predicted_share", "none", "predicted by (1−π)² alone", 1),
    ("squared_share", "raw", "of the gradient energy", 2), ("gradient_share", "raw", "of the summed gradient", 3),
    ("squared_share", "adamw", "of the energy, AdamW", 4),
    ("gradient_share", "adamw", "of the summed gradient, AdamW", 5),
)  # fmt: skip
"""Statistic, metric, words and look of the series of shares; missing ones are not drawn."""
INDICES = (
    ("predicted_index", "none", "(1−π)² alone", 1), ("dominance_index", "raw", "gradient energy", 2),
    ("dominance_index", "adamw", "gradient energy, AdamW", 4), ("gradient_index", "raw", "summed gradients", 3),
)  # fmt: skip


def rows(m: Measured) -> Rows:
    """Shares of the tokens, of Σ‖w·g‖² and of Σ(w·(1−π))², and the indices of `shares.token_shares`.

    Without an update, only the tokens' shares, without bounds. Also tokens, the number in each interval, and prompts,
    the number with a weight.
    """
    table, labels = m.table, m.labels
    counts = np.bincount(table["interval"], minlength=len(labels))
    parts, kept = [_alone("token_share", counts / counts.sum(), counts, "share", labels)], {}
    if m.weighted:
        parts = [token_shares(sum_by_prompt(table, len(labels)), labels, **m.draws("dominance"))]
        parts += _adamw_energy(m)
        error = sampling_error(table, labels, shares=parts[0], seed=m.settings.seed)
        if error is not None and not np.isnan(error.lower):
            kept["precision"] = error.of_bounds("the lowest share's bounds")
    parts.append(_alone("tokens", counts, counts, "tokens", labels))
    parts.append(one_row("prompts", float(m.supply.informative), len(table), unit="prompts"))
    return Rows(join_rows(parts), unweighted=("token_share",), kept=kept)


def _alone(statistic: str, values: np.ndarray, counts: np.ndarray, unit: str, labels: tuple[str, ...]) -> pd.DataFrame:
    found = np.vstack([values, np.full((2, len(labels)), np.nan)])
    return make_rows(statistic, found, counts, unit=unit, intervals=labels)


def _adamw_energy(m: Measured) -> list[pd.DataFrame]:
    """Return the shares of Σ‖w·g‖² in AdamW's metric, if the table has these norms."""
    if ADAMW not in m.table or m.table[ADAMW].isna().all():
        if m.metric is not None:
            title = "the AdamW-preconditioned gradient energy"
            why = "the table lacks norms in this metric; measure with metric adamw"
            m.leave_out("adamw_energy", title, "impossible", why)
        return []
    sums = sum_by_prompt(m.table, len(m.labels), ADAMW)
    squares = token_shares(sums, m.labels, **m.draws("dominance.adamw"))
    kept = squares["statistic"].isin(["squared_share", "dominance_index", "largest_share"])
    return [squares[kept].assign(metric="adamw")]


def say(found: Diagnosis) -> list[Finding]:
    """Say whether tokens of the lowest interval dominate, and whether (1−π)² explains it."""
    return [*_judge(found), *([] if found.scope.supply.too_few else _added(found))]


def _judge(d: Diagnosis) -> list[Finding]:
    low, supply = d.scope.low, d.scope.supply
    tokens, index = d.pick("token_share", "none", low), d.pick("dominance_index", "raw", low)
    if index is None:
        unknown = d.table["weight"].isna().any()
        words = f"Dominance is unknown: {'some weights are unknown' if unknown else 'every weight is 0'}."
        todo = "Sample prompts whose responses earn unequal rewards: all responses to a prompt here earn the same."
        if unknown:
            todo = "Give advantages or rewards for every response: without them there is no update to look at."
        return [Finding("dominance_raw", Verdict.UNKNOWN, words, " ".join(d.notes), next=todo)]
    if few := supply.too_few:
        return [Finding("dominance_raw", Verdict.UNDECIDED, few, next=_for_verdict(supply.wanted))]
    if not tokens["n"]:
        words = f"No token has {name_interval(low)}, so nothing can dominate."
        return [Finding("dominance_raw", Verdict.UNKNOWN, words)]
    if tokens["value"] == 1:
        words = f"All tokens have {name_interval(low)}, so shares by probability interval mean nothing here."
        return [Finding("dominance_raw", Verdict.UNKNOWN, words)]
    known = [metric for metric in ENERGY if d.pick("dominance_index", metric, low) is not None]
    made = [judge_dominance(d, metric, ENERGY[metric]) for metric in known]
    if isnan(index["lower"]) and index["lacks"] == "tokens":
        made[0] = replace(made[0], next=_for_verdict(more_tokens(supply)))
    return made


def _for_verdict(wanted: str) -> str:
    return f"For a verdict: {wanted[:1].lower()}{wanted[1:]}"


def judge_dominance(d: Diagnosis, metric: str, energy: str) -> Finding:
    """Judge whether tokens of the lowest interval dominate; energy: what the shares of `metric` are shares of."""
    low = d.scope.low
    if few := d.scope.supply.too_few:
        return Finding(f"dominance_{metric}", Verdict.UNDECIDED, few)
    tokens, index, share = (
        d.pick(*key, low) for key in (("token_share", "none"), ("dominance_index", metric), ("squared_share", metric))
    )
    whole = f"are {percent(tokens['value'])} % of the tokens and account for {share_words(share)} of the {energy}, "
    whole += f"{times_words(index)} their share of the tokens"
    keys = (("dominance_index", metric), ("squared_share", metric), ("token_share", "none"))
    found = replace(_judge_metric(d, metric, energy, whole), about=tuple((*key, low) for key in keys))
    if metric == "raw":
        brief = f"carry {times_words(index)} the average token's {energy}"
    else:
        brief = f"account for {share_words(share)} of the {energy}, {times_words(index)} their share of the tokens"
    return replace(found, brief=_judge_metric(d, metric, energy, brief).statement)


def _judge_metric(d: Diagnosis, metric: str, energy: str, are: str) -> Finding:
    """Judge dominance in one sentence; are: the numbers, as its predicate."""
    low, kind = d.scope.low, f"dominance_{metric}"
    index, share = d.pick("dominance_index", metric, low), d.pick("squared_share", metric, low)
    they = f"tokens with {name_interval(low)}"
    if share["value"] == 0:
        none = f"T{they[1:]} account for none of the {energy}: none of those measured has a nonzero weight."
        return Finding(kind, Verdict.UNKNOWN, none)
    if isnan(index["value"]):
        words = f"It is unknown how much of the {energy} {they} account for."
        return Finding(kind, Verdict.UNKNOWN, words)
    rows = ((label, d.pick("squared_share", metric, label)) for label in d.labels[1:])
    others = "; ".join(f"{name_interval(label)}: {share_words(row)}" for label, row in rows if not isnan(row["value"]))
    detail = f"Share of the {energy} of the other intervals: {others}."
    if index["lacks"] == "tokens":
        have = f"{index['n']:,} {they} were measured, and a verdict needs about {index['wanted']:,}"
        words = f"Too few tokens to say: {have}. {more_tokens(d.scope.supply)}"
        return Finding(kind, Verdict.UNDECIDED, words)
    if why := lack_words(index):
        return Finding(kind, Verdict.UNDECIDED, f"It is undecided how much of the {energy} {they} account for: {why}.")
    verdict = judge(index, write=times)
    if verdict is Verdict.UNDECIDED and (says_nothing(share) or says_nothing(index, "bits")):
        words = f"How much of the {energy} {they} account for cannot be told from this batch"
        return Finding(kind, verdict, f"{words}: {_why_vacuous(d, metric)}.", detail, "warn")
    if verdict is Verdict.MORE:
        return _rank(d, metric, f"{they} {are}", detail)
    if verdict is Verdict.LESS:
        words = f"Low-probability tokens do not dominate: {they} {are}."
        return Finding(kind, verdict, words, detail, "good")
    words = f"It is undecided whether low-probability tokens account for more than their share: {they} {are}."
    return Finding(kind, verdict, words, detail)


def more_tokens(supply: Supply) -> str:
    """Say what would give more measured tokens."""
    return "Measure more of them." if supply.minutes is None else f"Give {ceil(supply.minutes)} minutes or more."


def _why_vacuous(d: Diagnosis, metric: str) -> str:
    """Say what makes bounds say nothing: one token that holds much, or prompts that differ."""
    if d.table is not None and metric == "raw":
        squares, whole = weighted_norms(d.table) ** 2, total_squares(d.table)
        if np.nanmax(squares) >= HELD * whole:
            token = d.table.iloc[np.nanargmax(squares)]
            held = f"one token holds {percent(np.nanmax(squares) / whole)} % of it"
            held += f" ({token['token']!r} in response {token['response']})"
            return f"{held}, and other prompts may have no such token"
    return "its prompts differ too much"


def _rank(d: Diagnosis, metric: str, are: str, detail: str) -> Finding:
    """Judge whether the over-represented lowest interval also has the largest share of all intervals."""
    odds = pd.Series({label: d.pick("largest_share", metric, label)["value"] for label in d.labels})
    low, most, kind = d.scope.low, odds.idxmax(), f"dominance_{metric}"
    if odds[most] >= CERTAIN and most == low:
        words = f"Low-probability tokens dominate: {are} and the largest share of any interval"
        return Finding(kind, Verdict.DOMINATES, f"{words} ({_redraws(odds[low])}).", detail, "warn")
    words = f"T{are[1:]}"
    if odds[most] >= CERTAIN:
        return Finding(kind, Verdict.MORE, f"{words}; but {name_interval(most)} has the largest share.", detail)
    rival = odds.drop(low).idxmax()
    if odds[low] <= 1 - CERTAIN:
        larger = f"such as that of {name_interval(rival)}"
        return Finding(kind, Verdict.MORE, f"{words}; another interval's share is larger, {larger}.", detail)
    others = f"that of {name_interval(rival)} in {percent(odds[rival])} %"
    words += f"; whether theirs is the largest share is undecided (it is {_redraws(odds[low])}, {others})."
    if (wanted := prompts_to_decide(odds[most], d.scope.supply.informative)) is not None:
        detail += f" With unchanged shares, about {wanted:,} prompts would decide which is the largest."
    return Finding(kind, Verdict.MORE, words, detail)


def _redraws(odds: float) -> str:
    return f"in {percent(odds)} % of the redrawn batches"


def prompts_to_decide(odds: float, prompts: int) -> int | None:
    """Estimate how many prompts would settle a ranking that holds in `odds` of the resamples; None if too many.

    With a constant difference and an error that falls as 1/√n, Φ⁻¹(odds) grows as √n. Rounded to two digits.
    """
    from scipy.stats import norm

    reached = norm.ppf(odds)
    wanted = prompts * (norm.ppf(CERTAIN) / reached) ** 2 if reached > 0 else inf
    return None if not wanted <= MOST_PROMPTS * prompts else int(float(f"{wanted:.2g}"))


def _added(d: Diagnosis) -> list[Finding]:
    low = d.scope.low
    added, alone = d.pick("added_index", "raw", low), d.pick("predicted_index", "none", low)
    if added is None or isnan(added["lower"]) or says_nothing(added, "bits"):
        return []
    verdict = judge(added, write=times)
    # What does not differ would be the same number again.
    told = f"(1−π)² alone predicts {times_words(alone)} the average per token."
    detail = "" if verdict is Verdict.UNDECIDED else told
    words = {
        Verdict.MORE: "account for more gradient energy than (1−π)² alone predicts",
        Verdict.LESS: "account for less gradient energy than (1−π)² alone predicts",
    }.get(verdict, "do not differ detectably in gradient energy from what (1−π)² alone predicts")
    statement = f"Tokens with {name_interval(low)} {words}: {times_words(added)} as much."
    about = (("added_index", "raw", low), ("predicted_index", "none", low))
    return [Finding("added", verdict, statement, detail, next=_explained(d), about=about)]


def _explained(d: Diagnosis) -> str:
    """Say where no interval's energy is told from what (1−π)² alone predicts; "" where one is."""
    rows = {label: d.pick("added_index", "raw", label) for label in d.labels}
    known = {label: row for label, row in rows.items() if not isnan(row["lower"]) and not says_nothing(row, "bits")}
    if any(judge(row, write=times) is not Verdict.UNDECIDED for row in known.values()):
        return ""
    which = f"No energy of {counted(len(known), 'judged interval')}"
    which = "No interval's energy" if len(known) == len(rows) else which
    return (
        f"{which} differs detectably from what (1−π)² alone predicts: that needs no more measuring. "
        "TokenMonitor shows it at every step, from the trainer's own forward pass."
    )


def draw(found: Diagnosis) -> Figure:
    """Draw each interval's share of the tokens beside its shares of the gradients, and the dominance indices."""
    return plot_series(_series(found), **_LOOK)


_LOOK = {"ylabel": "", "xlabel": "π of the tokens", "size": (3.6, 3.0)}


def _series(d: Diagnosis) -> pd.DataFrame:
    shares = series_of(d.statistics, d.labels, SHARES, panel="shares (%)", factor=100.0)
    return pd.concat([shares, series_of(d.statistics, d.labels, INDICES, panel="bits above proportional")])


def show(found: Diagnosis, sheets: Sheets) -> list[Block]:
    d, blocks = found, []
    if d.pick("squared_share", "raw", d.scope.low) is not None:
        summed = d.pick("gradient_index", "raw", d.scope.low) is not None
        of = "; of summed gradients, the share of Σ_a ‖G_a‖²" if summed else ""
        caption = f"Left: each interval's share {shares_words(d, predicted=True)} Right: log₂ of a share over the "
        caption += f"share of the tokens{of}."
        blocks.append(sheets.series("dominance", _series(d), caption, bars=OVER_PROMPTS, **_LOOK))
    frame = pd.DataFrame([_interval_row(d, label) for label in d.labels]).dropna(axis=1, how="all")
    blocks.append(sheets.table("intervals", frame, "Each probability interval in numbers."))
    own = {"w": OWN_WEIGHT} if found.scope.settings.loss.is_whole else {}
    return blocks + define(DEFINITIONS | own)


def _interval_row(d: Diagnosis, label: str) -> dict[str, object]:
    def told(statistic: str, metric: str, write: Callable[[pd.Series], str]) -> str | None:
        row = d.pick(statistic, metric, label)
        return None if row is None else write(row)

    of = d.scope.of_summed
    return {
        "interval": name_interval(label),
        "tokens": int(d.pick("tokens", "none", label)["value"]),
        "share of the tokens": told("token_share", "none", share_words),
        "share of the gradient energy": told("squared_share", "raw", share_words),
        "times the average per token": told("dominance_index", "raw", times_words),
        f"share of the summed gradient{of}": told("gradient_share", "raw", share_words),
        "share of the energy, AdamW": told("squared_share", "adamw", share_words),
        f"share of the summed gradient, AdamW{of}": told("gradient_share", "adamw", share_words),
    }
