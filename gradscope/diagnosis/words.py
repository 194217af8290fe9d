"""A diagnosis in plain sentences, each with its numbers, interval and denominator, and no more than these bear."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import inf, isnan, nan

import numpy as np
import pandas as pd

from gradscope.diagnosis.format import bits_words, number_words, percent, share_words, short_number, step_words
from gradscope.diagnosis.result import Diagnosis, Finding, Verdict
from gradscope.gradients import LAYER, PARAMETERS, sampling_probabilities
from gradscope.resampling import in_brackets

ROUNDING = 1e-3
"""Largest |Δ log π| of any token, nats, that float32 and another order of its sums explain."""


def compare(d: Diagnosis, row: pd.Series, against: float | tuple[float, float] = 0.0) -> Verdict:
    """Whether a number's whole interval is above or below what it is compared with, of enough prompts."""
    least, most = against if isinstance(against, tuple) else (against, against)
    if d.judges and row["lower"] > most:
        return Verdict.MORE
    return Verdict.LESS if d.judges and row["upper"] < least else Verdict.UNDECIDED


def name_shares(d: Diagnosis, statistic: str, metric: str) -> str:
    """The share of each interval that has one."""
    rows = [(label, d.pick(statistic, metric, label)) for label in d.labels]
    return ", ".join(f"{label} {share_words(row)}" for label, row in rows if not isnan(row["value"]))


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
    tone, verdict = ("warn", Verdict.MORE) if more else ("plain", Verdict.FACT)
    return [Finding("influence", verdict, statement, f"{detail}.", tone)]


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
        verdict = compare(d, row, 0.5)
        tone = "warn" if verdict is Verdict.LESS else "plain"
        end = "" if isnan(row["lower"]) or not d.judges else ": not to be told from one half"
        end = {Verdict.MORE: ", more than half", Verdict.LESS: ", less than half"}.get(verdict, end)
        detail = f"By interval of π before the step: {parts}."
        found.append(Finding(f"direction_{sign}", verdict, f"{statement}{end}.", detail, tone))
    if {finding.verdict for finding in found} == {Verdict.MORE, Verdict.LESS}:
        # One sign gains what the other loses: tokens of both move alike, which is neither's success.
        words = " Tokens of both signs mostly move the same way."
        found = [replace(finding, statement=finding.statement + words, tone="warn") for finding in found]
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
        return [Finding("lag", Verdict.FACT, statement, f"Over {mean['n']:,} tokens.")]
    detail = (
        f"Of {low['n']:,} tokens, clipped low {share_words(low)}, clipped high {share_words(high)}, by the dual clip "
    )
    return [Finding("lag", Verdict.FACT, statement, f"{detail}{share_words(dual)}.")]


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
        return [Finding("bounds", Verdict.BROKEN, words, detail, "bad")]
    words = f"The bounds of Prop. 4.2 hold at the logits of all {b.num_tokens:,} tokens."
    return [Finding("bounds", Verdict.FACT, words, detail)]


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
    if best.setting == "plain":
        undecided, words = best.verdict == "undecided", "No α or η has a better predicted right-direction score than "
        words += (
            f"the plain loss{' on these prompts: too few batches for a verdict' if undecided else ': nothing to try'}."
        )
        return [Finding("setting", Verdict.UNDECIDED if undecided else Verdict.LESS, words, detail)]
    bounds = in_brackets(100 * best.lower, 100 * best.upper, "{:+.2f}".format)
    points = f"{100 * best.difference:+.2f} points{bounds}".replace("-", "−")
    words = f"{best.setting} scores {points} against the plain loss on held-out prompts"
    verdict, end, tone = {
        "better": (Verdict.MORE, ": worth a run.", "good"),
        "worse": (Verdict.LESS, ": no reason for a run.", "plain"),
        "no difference": (Verdict.UNDECIDED, ": no difference can be told.", "plain"),
        "undecided": (Verdict.UNDECIDED, ": too few batches for a verdict.", "plain"),
    }[best.verdict]
    return [Finding("setting", verdict, words + end, detail, tone)]


def _span(prompts: Sequence[int]) -> str:
    """How many prompts batches have: 1 prompt, or 2 to 3 prompts."""
    least, most = min(prompts), max(prompts)
    return f"{least if least == most else f'{least} to {most}'} prompt{'' if most == 1 else 's'}"


def findings(diagnosis: Diagnosis) -> list[Finding]:
    """The sentences, the most telling first; a part that was not computed has none."""
    makers: tuple[Callable[[Diagnosis], list[Finding]], ...] = (
        _dominance, _added, _norms, _summed, _signal, influence_words, direction_words,
        _where, _driver, _spikes, lag_words, bound_words, setting_words,
    )  # fmt: skip
    return [finding for make in makers for finding in make(diagnosis)]


def _dominance(d: Diagnosis) -> list[Finding]:
    low = d.labels[0]
    tokens, index = d.pick("token_share", "none", low), d.pick("dominance_index", "raw", low)
    if index is None:
        why = "some weights are unknown" if d.table["weight"].isna().any() else "every weight is 0"
        return [Finding("dominance_raw", Verdict.UNKNOWN, f"Dominance is not known: {why}.", " ".join(d.notes))]
    if not tokens["n"]:
        words = f"No token has π in {low}, so there is nothing that could dominate."
        return [Finding("dominance_raw", Verdict.UNKNOWN, words)]
    found = [_dominance_in(d, "raw", "")]
    if d.pick("dominance_index", "adamw", low) is not None:
        found.append(_dominance_in(d, "adamw", " in AdamW's metric"))
    return found


def _dominance_in(d: Diagnosis, metric: str, words: str) -> Finding:
    low, say = d.labels[0], partial(Finding, f"dominance_{metric}")
    tokens, index, share = (
        d.pick(*key, low) for key in (("token_share", "none"), ("dominance_index", metric), ("squared_share", metric))
    )
    if share["value"] == 0:
        none = f"Tokens with π in {low} hold nothing of Σ‖w·g‖²{words}: none that was measured has a weight."
        return say(Verdict.UNKNOWN, none)
    if isnan(index["value"]):
        return say(Verdict.UNKNOWN, f"How much of Σ‖w·g‖²{words} tokens with π in {low} hold is not known.")
    are = f"are {share_words(tokens)} of the tokens and hold {share_words(share)} of Σ‖w·g‖²{words}"
    holds = f"they {are}"
    times, each = short_number(2.0 ** index["value"]), name_shares(d, "squared_share", metric)
    detail = f"Dominance index {bits_words(index)}: their mean ‖w·g‖² is {times} times that of all tokens. "
    detail += f"Of Σ‖w·g‖²: {each}."
    largest = share["value"] >= np.nanmax([d.pick("squared_share", metric, label)["value"] for label in d.labels])
    if isnan(index["lower"]):
        alone = "the tokens of one prompt give no interval, so no verdict"
        return say(Verdict.UNDECIDED, f"Tokens with π in {low}: {holds}; {alone}.", detail)
    if not d.judges:
        prompts = d.num_informative_prompts
        few = f"{prompts} prompt{'s are' if prompts != 1 else ' is'} too few for a verdict"
        return say(Verdict.UNDECIDED, f"Tokens with π in {low} {are}; {few}.", detail)
    rare = f"ow-probability tokens (π in {low})"
    verdict = compare(d, index)
    if verdict is Verdict.MORE and largest:
        return say(Verdict.DOMINATES, f"L{rare} dominate{words}: {holds}.", detail, "warn")
    if verdict is Verdict.MORE:
        more = "hold more than their number, but another interval holds the most"
        return say(verdict, f"Tokens with π in {low} {more}: {holds}.", detail)
    if verdict is Verdict.LESS:
        return say(verdict, f"L{rare} do not dominate: {holds}, less than their number.", detail, "good")
    return say(verdict, f"Cannot tell whether l{rare} dominate: {holds}.", detail)


def _added(d: Diagnosis) -> list[Finding]:
    low = d.labels[0]
    added, alone = d.pick("added_index", "raw", low), d.pick("predicted_index", "none", low)
    if added is None or isnan(added["lower"]):
        return []
    detail = f"(1−π) alone predicts an index of {bits_words(alone)}; measured minus predicted: {bits_words(added)}."
    verdict = compare(d, added)
    words = {
        Verdict.MORE: "is more than 1−π alone predicts: the network adds to it.",
        Verdict.LESS: "is less than 1−π alone predicts: the network takes from it.",
    }.get(verdict, "cannot be told from what 1−π alone predicts.")
    return [Finding("added", verdict, f"What tokens with π in {low} hold of Σ‖w·g‖² {words}", detail)]


def _norms(d: Diagnosis) -> list[Finding]:
    """Norms of single tokens, without their weights."""
    if d.layers is None:
        return []
    means = d.layers.pivot(index="quantity", columns="interval", values="value")
    ratios = (means[0] / means[len(d.labels) - 1]).replace(inf, nan).dropna()
    if PARAMETERS not in ratios:
        return []
    rows = d.layers[d.layers["quantity"] == PARAMETERS].iloc[[0, -1]]
    low, top = (number_words(row, ".3g") for _, row in rows.iterrows())
    times = short_number(ratios[PARAMETERS])
    statement = (
        f"One by one, without weights, a token with π in {d.labels[0]} has {times} times the gradient norm of one with "
        f"π in {d.labels[-1]} on average: {low} against {top}, over {d.parameters}."
    )
    layers = ratios[[name.startswith(LAYER) for name in ratios.index]]
    if layers.empty:
        return [Finding("norms", Verdict.FACT, statement)]
    least, most = (_place(name) for name in (layers.idxmin(), layers.idxmax()))
    detail = f"By layer, from {short_number(layers.min())} times ({least}) to {short_number(layers.max())} ({most})."
    return [Finding("norms", Verdict.FACT, statement, detail)]


def _place(quantity: str) -> str:
    number = quantity.removeprefix(LAYER)
    return "input of block 1" if number == "0" else f"output of block {number}"


def _summed(d: Diagnosis) -> list[Finding]:
    found = []
    low = d.labels[0]
    for metric, words in (("raw", ""), ("adamw", " in AdamW's metric")):
        share, index = d.pick("gradient_share", metric, low), d.pick("gradient_index", metric, low)
        cosine, tokens = d.pick("cosine_with_all", metric, low), d.pick("token_share", "none", low)
        if share is None or isnan(share["value"]):
            continue
        statement = (
            f"Of this batch's summed gradient{words}, ⟨G_a, G⟩/‖G‖², tokens with π in {low} make {share_words(share)}, "
            f"being {share_words(tokens)} of the tokens."
        )
        detail = (
            f"All intervals: {name_shares(d, 'gradient_share', metric)}. Index of the summed gradients "
            f"{bits_words(index)}; cosine of G_a with G {number_words(cosine)}."
        )
        verdict = compare(d, share, (tokens["lower"], tokens["upper"]))
        if verdict is Verdict.UNDECIDED:
            statement += " Whether that is more than their number, this batch cannot tell."
        tone = "warn" if verdict is Verdict.MORE else "plain"
        found.append(Finding(f"summed_{metric}", verdict, statement, detail, tone))
    return found


def _signal(d: Diagnosis) -> list[Finding]:
    rows = [(label, d.pick("signal_fraction", "raw", label)) for label in (*d.labels, "all")]
    known = [(label, row) for label, row in rows if row is not None and not isnan(row["lower"])]
    if not known:
        return []
    each = ", ".join(f"{'all tokens' if name == 'all' else name} {share_words(row)}" for name, row in known)
    detail = f"Signal fraction of ‖G_a‖², over {d.num_prompts} prompts: {each}. Below 0 is chance."
    clear = [name for name, row in known if row["lower"] > 0]
    names, low = ", ".join("all tokens together" if name == "all" else name for name in clear), d.labels[0]
    if not clear:
        words = "In no interval can the summed gradient's signal be told from noise: other prompts may give another "
        return [Finding("signal", Verdict.UNDECIDED, f"{words}gradient.", detail, "warn")]
    statement = f"The summed gradient has a signal that other prompts share for {names}"
    missing = low not in clear and low in dict(known)
    statement += f"; for π in {low} it cannot be told from noise." if missing else "."
    tone, verdict = ("warn", Verdict.UNDECIDED) if missing else ("plain", Verdict.MORE)
    return [Finding("signal", verdict, statement, detail, tone)]


def _where(d: Diagnosis) -> list[Finding]:
    if d.where is None:
        return []
    found = []
    for driver, words in (("token_class", "by kind of token"), ("position_bin", "by position in the response")):
        rows = d.where[(d.where["driver"] == driver) & d.where["squared_share"].notna()]
        if len(rows) < 2:
            continue
        each = ", ".join(f"{r['value']} {_squared(r)} ({_tokens(r)} of the tokens)" for _, r in rows.iterrows())
        over = rows[(rows["squared_lower"] > rows["token_upper"]) & d.judges]
        names = ", ".join(f"{r['value']} ({_squared(r)} against {_tokens(r)})" for _, r in over.iterrows())
        statement = f"Σ‖w·g‖² {words}: no value's share can be told to be above its share of the tokens"
        statement += "." if d.judges else f" by {d.num_informative_prompts} prompts: too few for a verdict."
        if len(over):
            statement = f"Σ‖w·g‖² {words}: more than their share of the tokens have {names}."
        verdict = Verdict.MORE if len(over) else Verdict.UNDECIDED
        found.append(Finding(f"where_{driver}", verdict, statement, f"Of Σ‖w·g‖²: {each}."))
    return found


def _squared(row: pd.Series) -> str:
    return share_words(pd.Series({n: row[f"squared_{k}"] for n, k in _BOUNDS}))


def _tokens(row: pd.Series) -> str:
    return share_words(pd.Series({n: row[f"token_{k}"] for n, k in _BOUNDS}))


_BOUNDS = (("value", "share"), ("lower", "lower"), ("upper", "upper"))


def _driver(d: Diagnosis) -> list[Finding]:
    if d.drivers is None:
        return []
    rows = d.drivers[d.drivers["quantity"] == PARAMETERS].set_index("driver")
    row, names = rows.loc["difference"], ("log_one_minus_prob", "entropy")
    if row["collinear"]:
        words = "Probability and entropy go together too closely here to say which of them norms follow."
        return [Finding("driver", Verdict.UNDECIDED, words)]
    if isnan(row["lower"]):
        return []
    fits = ", ".join(
        f"{word} {number_words(rows.loc[name].rename({'coefficient': 'value'}))}"
        for name, word in zip(names, ("log(1−π)", "entropy"), strict=True)
    )
    detail = f"Standardised coefficients of the log norm over {d.parameters}, {row['tokens']:,} tokens that are not "
    detail += f"nearly certain: {fits}; R² of both {row['r2']:.2f}."
    few = "" if d.judges else f" by {d.num_informative_prompts} prompts, too few for a verdict"
    verdict = compare(d, row)
    words = {
        Verdict.MORE: "follow probability more than entropy",
        Verdict.LESS: "follow entropy more than probability",
    }.get(verdict, f"cannot be told to follow probability or entropy more{few}")
    return [Finding("driver", verdict, f"Norms of single tokens {words}.", detail)]


def _spikes(d: Diagnosis) -> list[Finding]:
    if d.spikes is None or d.spikes.empty:
        return []
    first, measured = d.spikes.iloc[0], int(d.table[PARAMETERS].notna().sum())
    together = percent(d.spikes["squared_share"].sum())
    of = "their Σ‖w·g‖²" if sampling_probabilities(d.table) is None else "Σ‖w·g‖², estimated for all tokens"
    statement = f"The {len(d.spikes)} largest of the {measured:,} measured tokens hold {together} % of {of}."
    weight = f"{first['weight']:+.2g}".replace("-", "−")
    where = f"token {first['token']!r} at position {first['position']} of response {first['response']}"
    detail = f"The largest: {where}, π {first['prob']:.2g}, weight {weight}, with "
    detail += f"{percent(first['squared_share'])} %. A fact of this batch, not of others."
    return [Finding("spikes", Verdict.FACT, statement, detail)]
