"""Sentences about steps: who moves whom, right directions, policy lag, the bounds, α and η."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan

import pandas as pd

from gradscope.diagnosis_format import Finding, number_words, share_words, step_words
from gradscope.diagnosis_result import Diagnosis

ROUNDING = 1e-3
"""Largest |Δ log π| of any token, nats, that float32 and another order of its sums explain."""


def influence_words(d: Diagnosis) -> list[Finding]:
    """Whose gradient moves the highest interval's tokens."""
    low, top = d.labels[0], d.labels[-1]
    share, own = d.pick("low_to_high_share", "none", top), d.pick("high_to_high_share", "none", top)
    if share is None or isnan(share["value"]):
        return []
    statement = (
        f"In one {step_words(d)} step, to first order, tokens with π in {low} cause {share_words(share)} of how tokens "
        f"with π in {top} move."
    )
    if share["value"] < 0:
        statement += " Below 0: they move them against the rest."
    detail = (
        f"Of the variance of their predicted Δ log π, over {share['n']:,} tokens; the shares of all sources add up to "
    )
    detail += f"100 %, that of one against the rest is below 0. Their own interval causes {share_words(own)}"
    rows = d.influence[(d.influence["source"] == "momentum") & (d.influence["target"] == len(d.labels) - 1)]
    if len(rows):
        bounds = {"share": "value", "share_lower": "lower", "share_upper": "upper"}
        detail += f", the momentum of earlier steps {share_words(rows.iloc[0][list(bounds)].rename(bounds))}"
    more = d.judges and share["lower"] > own["upper"]
    return [(statement, f"{detail}.", "warn" if more else "plain")]


def direction_words(d: Diagnosis) -> list[Finding]:
    """Who moved the way that the advantage asks; the actual step before the predicted one."""
    found = []
    for sign, word, way in (("positive", "Â > 0", "rose"), ("negative", "Â < 0", "fell")):
        kind = "actual" if d.pick(f"right_direction_{sign}_actual", "none", "all") is not None else "predicted"
        name = f"right_direction_{sign}_{kind}"
        row = d.pick(name, "none", "all")
        if row is None or isnan(row["value"]):
            continue
        done = f"In one {step_words(d)} step on this batch" if kind == "actual" else "In one predicted step"
        statement = f"{done}, {share_words(row)} of the {row['n']:,} tokens with {word} that moved {way}"
        each = [(label, d.pick(name, "none", label)) for label in d.labels]
        parts = ", ".join(f"{label} {share_words(r)} of {r['n']:,}" for label, r in each if not isnan(r["value"]))
        tone, end = "plain", ": not to be told from one half."
        if isnan(row["lower"]) or not d.judges:
            end = "."
        elif row["lower"] > 0.5:
            end = ", more than half."
        elif row["upper"] < 0.5:
            tone, end = "warn", ", less than half."
        found.append((statement + end, f"By interval of π before the step: {parts}.", tone))
    if [statement.endswith(("more than half.", "less than half.")) for statement, _, _ in found] == [True, True] and (
        {tone for _, _, tone in found} == {"plain", "warn"}
    ):
        # One sign gains what the other loses: tokens of both move alike, which is neither's success.
        words = " Tokens of both signs mostly move the same way."
        found = [(statement + words, detail, "warn") for statement, detail, _ in found]
    return found


def lag_words(d: Diagnosis) -> list[Finding]:
    """How far the policy is from the one that sampled, and what is clipped."""
    mean, worst = d.pick("logprob_difference_mean"), d.pick("logprob_difference_max")
    if mean is None:
        return []
    low, high, dual = (d.pick(f"clip_{name}") for name in ("low", "high", "dual"))
    numbers = f"mean |Δ log π| {number_words(mean, '.2g')} nats, at most {worst['value']:.2g}".replace("-", "−")
    statement = f"The policy has moved away from the one that sampled: {numbers}."
    if worst["value"] < ROUNDING:
        statement = f"The policy is the one that sampled, up to rounding: {numbers}."
    if isnan(low["value"]):
        return [(statement, f"Over {mean['n']:,} tokens.", "plain")]
    detail = (
        f"Of {low['n']:,} tokens, clipped low {share_words(low)}, clipped high {share_words(high)}, by the dual clip "
    )
    return [(statement, f"{detail}{share_words(dual)}.", "plain")]


def bound_words(d: Diagnosis) -> list[Finding]:
    """Whether Prop. 4.2 holds, which tests the measurement."""
    if d.bounds is None or not d.bounds.num_tokens:
        return []
    b = d.bounds
    detail = (
        f"Smallest distance of a norm from the lower bound {b.lower_margin:.1e}, from the upper {b.upper_margin:.1e}, "
        f"relative; rounding is granted {b.tolerance:.0e} at most."
    ).replace("-", "−")
    if b.violations:
        words = f"The bounds of Prop. 4.2 break on {b.violations:,} of {b.num_tokens:,} tokens: do not trust this."
        return [(words, detail, "bad")]
    return [(f"The bounds of Prop. 4.2 hold at the logits of all {b.num_tokens:,} tokens.", detail, "plain")]


def setting_words(d: Diagnosis) -> list[Finding]:
    """What α and η are worth a try."""
    if (best := d.recommendation) is None:
        return []
    detail = (
        f"One {step_words(d)} step predicted to first order on {best.num_batches} batches of "
        f"{_span(best.prompts_per_batch)}, {len(best.settings)} settings."
    )
    if not best.eta_judged:
        detail += " η is not judged: to first order its two steps are plain's one."
    if best.setting == "plain" and best.verdict == "undecided":
        return [("No α or η has a better predicted right-direction score than the plain loss on these prompts: too few "
                 "batches for a verdict.", detail, "plain")]  # fmt: skip
    if best.setting == "plain":
        return [("No α or η has a better predicted right-direction score than the plain loss: nothing to try.", detail,
                 "plain")]  # fmt: skip
    row = pd.Series({"value": best.difference, "lower": best.lower, "upper": best.upper})
    bounds = "" if isnan(row["lower"]) else f" [{100 * row['lower']:+.2f}, {100 * row['upper']:+.2f}]"
    points = f"{100 * best.difference:+.2f} points{bounds}".replace("-", "−")
    words = f"{best.setting} scores {points} against the plain loss on held-out prompts"
    end = {
        "better": ": worth a run.", "worse": ": no reason for a run.",
        "no difference": ": no difference can be told.", "undecided": ": too few batches for a verdict.",
    }[best.verdict]  # fmt: skip
    return [(words + end, detail, "good" if best.verdict == "better" else "plain")]


def _span(prompts: Sequence[int]) -> str:
    """How many prompts batches have: 1 prompt, or 2 to 3 prompts."""
    least, most = min(prompts), max(prompts)
    return f"{least if least == most else f'{least} to {most}'} prompt{'' if most == 1 else 's'}"
