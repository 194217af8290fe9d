"""A diagnosis in sentences, each with its numbers, interval and denominator, and no stronger than these support."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import ceil, exp, inf, isnan, nan

import pandas as pd

from gradscope.diagnosis.format import (
    name_interval,
    norm_words,
    number_words,
    percent,
    says_nothing,
    share_bounds,
    share_words,
    step_words,
    times,
    times_words,
)
from gradscope.diagnosis.result import (
    REWARD_PART,
    VERDICT_PROMPTS,
    Diagnosis,
    Finding,
    Findings,
    Shares,
    Verdict,
)
from gradscope.diagnosis.tokens import energy_factors, scaled_squares, total_squares
from gradscope.errors import checked
from gradscope.gradients import LAYER, PARAMETERS, sampling_probabilities
from gradscope.objective import off_policy_sentence
from gradscope.resampling import Supply
from gradscope.runs import counted, digits

CERTAIN = 0.95
"""Share of the resampled batches in which a ranking must hold to be stated."""
MOST_PROMPTS = 100
"""Largest number of prompts stated to decide a ranking, as a multiple of those present; more would be a guess."""
CONCENTRATED = 0.25
"""Share of the gradient energy above which a single prompt is mentioned."""
NAMED = 5
"""Number of the largest tokens to name."""
PULLING = 0.01
"""Share of the gradient energy above which the KL penalty's is mentioned."""
ENERGY = {"raw": "gradient energy", "adamw": "AdamW-preconditioned gradient energy"}


Maker = Callable[[Diagnosis], list[Finding]]


@checked
def findings(diagnosis: Diagnosis) -> Findings:
    """Return the findings, most informative first; parts that were not computed have none.

    Where too few prompts have a gradient, nothing is said of shares, sums and steps.
    """
    makers: tuple[Maker, ...] = (
        _dominance, _concentration, _added, _norms, _summed, _signal, influence_words, direction_words,
        _where, _driver, _spikes, _pull, _mismatch, lag_words, bound_words,
    )  # fmt: skip
    if diagnosis.supply.too_few:
        judged: tuple[Maker, ...] = (_concentration, _added, _summed, _signal, influence_words, direction_words, _where)
        makers = tuple(make for make in makers if make not in judged)
    return Findings(finding for make in makers for finding in make(diagnosis))


def compare(row: pd.Series, against: float | pd.Series = 0.0, *, write: Callable[[float], str] = percent) -> Verdict:
    """Judge a number by its printed interval: entirely above, entirely below, or on both sides of `against`.

    against: a number, or one with an interval, which must not overlap. write: the format in which both are printed;
    bounds that look alike decide nothing. Without an interval, nothing is decided.
    """
    least, most = (against, against) if isinstance(against, float) else (against["lower"], against["upper"])
    if row["lower"] > most and write(row["lower"]) != write(most):
        return Verdict.MORE
    return Verdict.LESS if row["upper"] < least and write(row["upper"]) != write(least) else Verdict.UNDECIDED


def lack_words(row: pd.Series) -> str:
    """Say why a number has no interval, and what would give one; "" if it has one."""
    if not isnan(row["lower"]):
        return ""
    if row["lacks"] == "prompts":
        return f"tokens of fewer than {row['wanted']} prompts give no interval"
    if row["lacks"] == "tokens":
        return f"{row['n']:,} measured tokens are too few for an interval, which needs about {row['wanted']:,}"
    return "no interval: it does not vary between prompts, or comes from a single one"


def name_shares(d: Diagnosis | Shares, statistic: str, metric: str) -> str:
    """List the share of each interval but the lowest that has one."""
    rows = [(label, d.pick(statistic, metric, label)) for label in d.labels[1:]]
    return "; ".join(f"{name_interval(label)}: {share_words(row)}" for label, row in rows if not isnan(row["value"]))


def _dominance(d: Diagnosis) -> list[Finding]:
    low = d.labels[0]
    tokens, index = d.pick("token_share", "none", low), d.pick("dominance_index", "raw", low)
    if index is None:
        why = "some weights are unknown" if d.table["weight"].isna().any() else "every weight is 0"
        return [Finding("dominance_raw", Verdict.UNKNOWN, f"Dominance is unknown: {why}.", " ".join(d.notes))]
    if d.supply.too_few:
        return [dominance_words(d, "raw", ENERGY["raw"])]
    if not tokens["n"]:
        words = f"No token has {name_interval(low)}, so nothing can dominate."
        return [Finding("dominance_raw", Verdict.UNKNOWN, words)]
    if tokens["value"] == 1:
        words = f"All tokens have {name_interval(low)}, so shares by probability interval mean nothing here."
        return [Finding("dominance_raw", Verdict.UNKNOWN, words)]
    known = [metric for metric in ENERGY if d.pick("dominance_index", metric, low) is not None]
    return [dominance_words(d, metric, ENERGY[metric]) for metric in known]


def _concentration(d: Diagnosis) -> list[Finding]:
    """Say if one prompt holds much of the energy, in which case resampling prompts says little."""
    by_prompt = pd.Series(scaled_squares(d.table)).groupby(d.table["group"].to_numpy()).sum()
    share = by_prompt.max() / by_prompt.sum() if by_prompt.sum() > 0 else nan
    if not (share >= CONCENTRATED and len(by_prompt) >= VERDICT_PROMPTS):
        return []
    statement = f"One of {len(by_prompt):,} prompts holds {percent(share)} % of the gradient energy."
    detail = (
        f"Prompt {by_prompt.idxmax()}. This makes intervals over prompts wide: whether another batch has such a prompt "
        "cannot be seen from this one."
    )
    return [Finding("concentration", Verdict.FACT, statement, detail, "warn")]


def dominance_words(d: Diagnosis | Shares, metric: str, energy: str) -> Finding:
    """Judge whether tokens of the lowest interval dominate; energy: what the shares of `metric` are shares of."""
    low = d.labels[0]
    if few := d.supply.too_few:
        return Finding(f"dominance_{metric}", Verdict.UNDECIDED, few)
    tokens, index, share = (
        d.pick(*key, low) for key in (("token_share", "none"), ("dominance_index", metric), ("squared_share", metric))
    )
    whole = f"are {percent(tokens['value'])} % of the tokens and account for {share_words(share)} of the {energy}, "
    whole += f"{times_words(index)} their share of the tokens"
    found = _judge_dominance(d, metric, energy, whole)
    if metric == "raw":
        brief = f"carry {times_words(index)} the average token's {energy}"
    else:
        brief = f"account for {share_words(share)} of the {energy}, {times_words(index)} their share of the tokens"
    return replace(found, brief=_judge_dominance(d, metric, energy, brief).statement)


def _judge_dominance(d: Diagnosis | Shares, metric: str, energy: str, are: str) -> Finding:
    """Judge dominance in one sentence; are: the numbers, as its predicate."""
    low, kind = d.labels[0], f"dominance_{metric}"
    index, share = d.pick("dominance_index", metric, low), d.pick("squared_share", metric, low)
    they = f"tokens with {name_interval(low)}"
    if share["value"] == 0:
        none = f"T{they[1:]} account for none of the {energy}: none of those measured has a nonzero weight."
        return Finding(kind, Verdict.UNKNOWN, none)
    if isnan(index["value"]):
        words = f"It is unknown how much of the {energy} {they} account for."
        return Finding(kind, Verdict.UNKNOWN, words)
    detail = f"Share of the {energy} of the other intervals: {name_shares(d, 'squared_share', metric)}."
    if index["lacks"] == "tokens":
        return Finding(kind, Verdict.UNDECIDED, _too_few_tokens(d, index, they))
    if why := lack_words(index):
        return Finding(kind, Verdict.UNDECIDED, f"It is undecided how much of the {energy} {they} account for: {why}.")
    verdict = compare(index, write=times)
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


def _too_few_tokens(d: Diagnosis | Shares, index: pd.Series, they: str) -> str:
    """Return the headline where prompts suffice, but not the measured tokens."""
    have = f"{index['n']:,} {they} were measured, and a verdict needs about {index['wanted']:,}"
    return f"Too few tokens to say: {have}. {more_tokens(d.supply)}"


def more_tokens(supply: Supply) -> str:
    """Say what would give more measured tokens."""
    return "Measure more of them." if supply.minutes is None else f"Give {ceil(supply.minutes)} minutes or more."


def _why_vacuous(d: Diagnosis | Shares, metric: str) -> str:
    """Say what makes an interval say nothing: one token that holds much, or prompts that differ."""
    if isinstance(d, Diagnosis) and metric == "raw":
        squares = (d.table["weight"] * d.table[PARAMETERS]).astype(float) ** 2
        whole = total_squares(d.table)
        if squares.max() >= CONCENTRATED * whole:
            token = d.table.loc[squares.idxmax()]
            held = f"one token holds {percent(squares.max() / whole)} % of it"
            held += f" ({token['token']!r} in response {token['response']})"
            return f"{held}, and other prompts may have no such token"
    return "its prompts differ too much"


def _rank(d: Diagnosis | Shares, metric: str, are: str, detail: str) -> Finding:
    """Judge whether the over-represented lowest interval also has the largest share of all intervals."""
    odds = pd.Series({label: d.pick("largest_share", metric, label)["value"] for label in d.labels})
    low, most, kind = d.labels[0], odds.idxmax(), f"dominance_{metric}"
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
    if (wanted := prompts_to_decide(odds[most], d.num_informative_prompts)) is not None:
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
    low = d.labels[0]
    added, alone = d.pick("added_index", "raw", low), d.pick("predicted_index", "none", low)
    if added is None or isnan(added["lower"]) or says_nothing(added, "bits"):
        return []
    detail = f"(1−π)² alone predicts {times_words(alone)} the average per token."
    verdict = compare(added, write=times)
    words = {
        Verdict.MORE: "account for more gradient energy than (1−π)² alone predicts",
        Verdict.LESS: "account for less gradient energy than (1−π)² alone predicts",
    }.get(verdict, "do not differ detectably in gradient energy from what (1−π)² alone predicts")
    statement = f"Tokens with {name_interval(low)} {words}: {times_words(added)} as much."
    return [Finding("added", verdict, statement, detail)]


def _norms(d: Diagnosis) -> list[Finding]:
    """Describe the unweighted norms of single tokens."""
    from gradscope.plots import label_of  # which loads matplotlib

    if d.layers is None:
        return []
    means = d.layers.pivot(index="quantity", columns="interval", values="value")
    ratios = (means[0] / means[len(d.labels) - 1]).replace(inf, nan).dropna()
    if PARAMETERS not in ratios:
        return []
    rows = d.layers[d.layers["quantity"] == PARAMETERS].iloc[[0, -1]]
    if rows["lower"].isna().any():  # of a few prompts
        return []
    low, top = (norm_words(row) for _, row in rows.iterrows())
    statement = (
        f"Unweighted, the gradient norm of a token with {name_interval(d.labels[0])} is "
        f"{digits(ratios[PARAMETERS])} times that of one with {name_interval(d.labels[-1])} on average: "
        f"{low} against {top}, over {d.parameters}."
    )
    layers = ratios[[name.startswith(LAYER) for name in ratios.index]]
    if layers.empty:
        return [Finding("norms", Verdict.FACT, statement)]
    least, most = (label_of(name) for name in (layers.idxmin(), layers.idxmax()))
    detail = f"By layer, from {digits(layers.min())} times ({least}) to {digits(layers.max())} ({most})."
    return [Finding("norms", Verdict.FACT, statement, detail)]


def _summed(d: Diagnosis) -> list[Finding]:
    found = []
    low = d.labels[0]
    for metric, words in (("raw", "summed gradient"), ("adamw", "AdamW-preconditioned summed gradient")):
        share, cosine = d.pick("gradient_share", metric, low), d.pick("cosine_with_all", metric, low)
        tokens = d.pick("token_share", "none", low)
        if share is None or isnan(share["value"]) or isnan(tokens["value"]):
            continue
        they, fewer = f"Tokens with {name_interval(low)}", d.sums_prompts not in (None, d.num_prompts)
        if isnan(share["lower"]) and share["lacks"] == "prompts" and fewer:
            few = f"Too few prompts to say whose the {words} is: {d.summed_prompts} were summed."
            found.append(Finding(f"summed_{metric}", Verdict.UNDECIDED, few))
            continue
        of = f"of the {words}{'' if d.sums_prompts in (None, d.of_prompts) else f' of {d.summed_prompts}'}"
        if says_nothing(share):
            untold = f"How much {of} {they[0].lower()}{they[1:]} account for cannot be told from this batch."
            found.append(Finding(f"summed_{metric}", Verdict.UNDECIDED, untold))
            continue
        whose = f" of {counted(d.num_prompts, 'prompt')}" if fewer else ""
        statement = f"{they}, {share_words(tokens)} of the tokens{whose}, account for {share_words(share)} {of}"
        brief = f"{they} account for {share_words(share)} {of}"
        detail = (
            f"Share ⟨G_a, G⟩/‖G‖² of the other intervals: {name_shares(d, 'gradient_share', metric)}. Cosine of "
            f"{name_interval(low)} with the whole: {number_words(cosine)}."
        )
        verdict, why = compare(share, tokens), lack_words(share) or lack_words(tokens)
        end = {Verdict.MORE: ": more than in proportion.", Verdict.LESS: ": less than in proportion."}.get(
            verdict, f"; {why}." if why else ". Whether that is more than in proportion is undecided."
        )
        tone = "warn" if verdict is Verdict.MORE else "plain"
        brief += end
        if metric == "raw":  # whose share the first screen has
            which = {Verdict.MORE: "a larger share", Verdict.LESS: "a smaller share"}.get(verdict)
            brief = f"{they} have {which} {of} than of the tokens."
            if which is None:
                brief = f"Whether {they[0].lower()}{they[1:]} have a larger share {of} than of the tokens is undecided"
                brief += f": {why}." if why else "."
        found.append(Finding(f"summed_{metric}", verdict, f"{statement}{end}", detail, tone, brief))
    return found


def _signal(d: Diagnosis) -> list[Finding]:
    rows = [(label, d.pick("signal_fraction", "raw", label)) for label in (*d.labels, "all")]
    known = [(label, row) for label, row in rows if row is not None and not isnan(row["lower"])]
    if not known:
        return []
    each = "; ".join(f"{_group(name)}: {share_words(row)}" for name, row in known if name != "all")
    detail = f"Signal fraction of ‖G_a‖², over {d.summed_prompts}: {each}. "
    detail += "Negative estimates arise by chance."
    clear = [name for name, row in known if compare(row) is Verdict.MORE]
    names, low = ", ".join(map(_group, clear)), d.labels[0]
    if not clear:
        words = f"{d.summed_prompts[:1].upper()}{d.summed_prompts[1:]} are too few to separate any interval's summed "
        words += "gradient from noise."
        return [Finding("signal", Verdict.UNDECIDED, words, detail, "warn")]
    statement = f"The summed gradient has detectable signal in: {names}"
    missing = low not in clear and low in dict(known)
    statement += f". For {name_interval(low)} none is detectable." if missing else "."
    tone, verdict = ("warn", Verdict.UNDECIDED) if missing else ("plain", Verdict.MORE)
    return [Finding("signal", verdict, statement, detail, tone)]


def _group(label: str) -> str:
    return "all tokens" if label == "all" else name_interval(label)


def influence_words(d: Diagnosis) -> list[Finding]:
    """Say whose gradient moves the tokens of the highest interval."""
    low, top = d.labels[0], d.labels[-1]
    share, own = d.pick("low_to_high_share", "none", top), d.pick("high_to_high_share", "none", top)
    if share is None or isnan(share["value"]):
        return []
    step = f"In one {step_words(d)} step, to first order,"
    if says_nothing(share):
        words = (
            f"{step} it cannot be told how much tokens with {name_interval(low)} move those with {name_interval(top)}."
        )
        return [Finding("influence", Verdict.UNDECIDED, words)]
    statement = (
        f"{step} tokens with {name_interval(low)} account for "
        f"{share_words(share)} of the movement of tokens with {name_interval(top)}."
    )
    if compare(share) is Verdict.LESS:
        statement += " The negative share means that they oppose the overall movement."
    detail = f"Share of the variance of the predicted Δ log π of {share['n']:,} tokens; the shares of all sources add "
    detail += "up to 100 %, and are negative for sources that counteract. Their own interval accounts for "
    detail += share_words(own)
    rows = d.influence[(d.influence["source"] == "momentum") & (d.influence["target"] == len(d.labels) - 1)]
    if len(rows):
        bounds = {"share": "value", "share_lower": "lower", "share_upper": "upper"}
        detail += f", the momentum of earlier steps for {share_words(rows.iloc[0][list(bounds)].rename(bounds))}"
    more = compare(share, own) is Verdict.MORE
    tone, verdict = ("warn", Verdict.MORE) if more else ("plain", Verdict.FACT)
    return [Finding("influence", verdict, statement, f"{detail}.", tone)]


def direction_words(d: Diagnosis) -> list[Finding]:
    """Say how many tokens moved in the direction of their advantage, in the actual step or else the predicted one."""
    found = []
    for sign, word, way in (("positive", "Â > 0", "likelier"), ("negative", "Â < 0", "less likely")):
        kind = "actual" if d.pick(f"right_direction_{sign}_actual", "none", "all") is not None else "predicted"
        name = f"right_direction_{sign}_{kind}"
        row = d.pick(name, "none", "all")
        if row is None or isnan(row["value"]):
            continue
        done = f"In one {step_words(d)} step on this batch" if kind == "actual" else "In one predicted step"
        statement = f"{done}, of the {row['n']:,} tokens with {word} that moved, {share_words(row)} became {way}"
        each = [(label, d.pick(name, "none", label)) for label in d.labels]
        parts = "; ".join(
            f"{name_interval(label)}: {share_words(r)} of {r['n']:,}" for label, r in each if not isnan(r["value"])
        )
        verdict = compare(row, 0.5)
        tone = "warn" if verdict is Verdict.LESS else "plain"
        judged = not isnan(row["lower"]) and not says_nothing(row)
        end = ": no detectable difference from one half" if judged else ""
        end = {Verdict.MORE: ", more than half", Verdict.LESS: ", less than half"}.get(verdict, end)
        detail = f"By interval of π before the step: {parts}."
        brief = f"{done}, of the tokens with {word} that moved, " + {
            Verdict.MORE: f"more than half became {way}.",
            Verdict.LESS: f"less than half became {way}.",
        }.get(verdict, f"about half became {way}: no detectable difference.")
        brief = brief if end else ""
        found.append(Finding(f"direction_{sign}", verdict, f"{statement}{end}.", detail, tone, brief))
    if {finding.verdict for finding in found} == {Verdict.MORE, Verdict.LESS}:
        # If one sign gains what the other loses, all tokens move alike, which is no success of either.
        words = " Tokens of both signs mostly move the same way."
        found = [
            replace(one, statement=one.statement + words, brief=one.brief and one.brief + words, tone="warn")
            for one in found
        ]
    return found


def _where(d: Diagnosis) -> list[Finding]:
    if d.where is None:
        return []
    found = []
    for driver, words in (("token_class", "kind of token"), ("position_class", "position in the response")):
        rows = d.where[(d.where["driver"] == driver) & d.where["squared_share"].notna()]
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
            if compare(energy, tokens) is Verdict.MORE
        )
        statement = f"No {words} accounts for detectably more gradient energy than its share of the tokens."
        if over:
            statement = f"By {words}, more gradient energy than in proportion to the tokens: {over}."
        detail = f"Share of the gradient energy, with joint 95 % intervals for all {len(told)}: {each}."
        found.append(Finding(f"where_{driver}", Verdict.MORE if over else Verdict.UNDECIDED, statement, detail))
    return found


def _one_of(row: pd.Series, of: str) -> pd.Series:
    """Return the share `of` tokens or squares in a row of `Diagnosis.where`, with its interval."""
    return pd.Series({name: row[f"{of}_{end}"] for name, end in _BOUNDS})


_BOUNDS = (("value", "share"), ("lower", "lower"), ("upper", "upper"))


def _driver(d: Diagnosis) -> list[Finding]:
    if d.drivers is None:
        return []
    rows = d.drivers[d.drivers["quantity"] == PARAMETERS].set_index("driver")
    row, names = rows.loc["difference"], ("log_one_minus_prob", "entropy")
    if row["collinear"]:
        words = "Probability and entropy are too strongly correlated here to say which of them the norms follow."
        return [Finding("driver", Verdict.UNDECIDED, words)]
    if isnan(row["lower"]):
        return []
    rows = rows.rename(columns={"coefficient": "value"})
    fits = ", ".join(
        f"{word} {number_words(rows.loc[name])}" for name, word in zip(names, ("log(1−π)", "entropy"), strict=True)
    )
    detail = f"Standardised coefficients of the log norm over {d.parameters}, {row['tokens']:,} tokens that are not "
    detail += f"nearly certain: {fits}; R² of both {row['r2']:.2f}."
    row = rows.loc["difference"]
    verdict = compare(row, write="{:.2f}".format)
    words = {
        Verdict.MORE: "Token gradient norms follow probability more than entropy",
        Verdict.LESS: "Token gradient norms follow entropy more than probability",
    }.get(verdict, "Whether token gradient norms follow probability or entropy more is undecided")
    apart = f"{words}: the sizes of their coefficients differ by {number_words(row)}."
    return [Finding("driver", verdict, apart, detail)]


def _spikes(d: Diagnosis) -> list[Finding]:
    if d.spikes is None or d.spikes.empty:
        return []
    measured = int(d.table[PARAMETERS].notna().sum())
    together = percent(d.spikes["squared_share"].sum())
    of = "the gradient energy of all"
    if sampling_probabilities(d.table) is not None:
        of = "the gradient energy, estimated for all tokens"
    these = f"{len(d.spikes)} of {measured:,} measured tokens with the largest ‖w·g‖"
    if len(d.spikes) == measured:
        these = f"{measured} measured tokens"
    statement = f"The {these} hold {together} % of {of}."
    statement += _split_rewards(d.spikes.head(NAMED))
    told = "; ".join(_spike_words(spike) for _, spike in d.spikes.head(NAMED).iterrows())
    detail = f"The largest: {told}. This describes this batch only."
    return [Finding("spikes", Verdict.FACT, statement, detail)]


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


def _pull(d: Diagnosis) -> list[Finding]:
    """Name the tokens that hold the KL penalty's gradient, if it is large enough to matter."""
    if "kl_weight" not in d.table or not d.table["kl_weight"].any():
        return []
    squares = d.table[["kl_weight", "weight"]].mul(d.table[PARAMETERS], axis=0).astype(float) ** 2
    own, whole = ((squares[name] * energy_factors(d.table, name)).sum() for name in squares)
    if not own > PULLING * whole:
        return []
    first = d.table.assign(squared_share=squares["kl_weight"] / own).nlargest(NAMED, "squared_share")
    first = first[first["squared_share"] > 0]
    statement = (
        f"The KL penalty alone has {percent(own / whole)} % of the loss's gradient energy; "
        f"{len(first)} token{'s hold' if len(first) > 1 else ' holds'} {percent(first['squared_share'].sum())} % of it."
    )
    told = "; ".join(
        f"{token['token']!r} in response {token['response']} (π {digits(token['prob'])}, "
        f"π_ref {digits(exp(token['ref_logprob']))}; {percent(token['squared_share'])} %)"
        for _, token in first.iterrows()
    )
    tone = "warn" if own > whole else "plain"
    return [Finding("kl", Verdict.FACT, statement, f"The largest: {told}.", tone)]


def _mismatch(d: Diagnosis) -> list[Finding]:
    """Say how far sampler and trainer differ, by which power of 1 − π, and what is masked for that reason."""
    if d.mismatch is None:
        return []
    mean, power, whole = d.pick("mismatch_mean", interval="all"), d.pick("mismatch_power"), d.mismatch.iloc[-1]
    statement = f"The sampler's log π differs from the trainer's by {number_words(mean, 2)} nats on average."
    verdict, tone = Verdict.FACT, "plain"
    if whole["masked_share"] > 0:
        tone = "warn"
        statement += (
            f" {percent(whole['masked_share'])} % of the tokens are masked; with their response's advantage they would "
            f"have about {percent(whole['removed_share'])} % of the gradient energy."
        )
    if power is None or isnan(power["lower"]):
        return [Finding("mismatch", verdict, statement, tone=tone)]
    verdict = compare(power, 1.0, write=digits)
    detail = f"It grows as 1 − π to the power {number_words(power, 2)}"
    detail += {
        Verdict.MORE: ": steeper than an error in the logits, whose power is 1.",
        Verdict.LESS: ": less steep than an error in the logits, whose power is 1.",
    }.get(verdict, "; an error in the logits has power 1.")
    return [Finding("mismatch", verdict, statement, detail, tone)]


def lag_words(d: Diagnosis) -> list[Finding]:
    """Say how far the policy is from the one that sampled, and how much is clipped."""
    mean, worst = d.pick("logprob_difference_mean"), d.pick("logprob_difference_max")
    if mean is None:
        return []
    low, high, dual = (d.pick(f"clip_{name}") for name in ("low", "high", "dual"))
    statement = off_policy_sentence(number_words(mean, 2), worst["value"])
    if isnan(low["value"]):
        return [Finding("lag", Verdict.FACT, statement, f"Over {counted(mean['n'], 'token')}.")]
    detail = (
        f"Of {counted(low['n'], 'token')}, clipped low {share_words(low)}, clipped high {share_words(high)}, "
        "by the dual clip "
    )
    return [Finding("lag", Verdict.FACT, statement, f"{detail}{share_words(dual)}.")]


def bound_words(d: Diagnosis) -> list[Finding]:
    """Say whether Prop. 4.2 holds, as a test of the measurement."""
    if d.bounds is None or not d.bounds.num_tokens:
        return []
    b = d.bounds
    detail = (
        f"Smallest distance of a norm from the lower bound {digits(b.lower_margin)}, from the upper "
        f"{digits(b.upper_margin)}, relative; rounding is allowed at most {digits(b.tolerance, 1)}."
    )
    if b.violations:
        words = f"The bounds of Prop. 4.2 fail on {b.violations:,} of {b.num_tokens:,} tokens"
        return [Finding("bounds", Verdict.BROKEN, f"{words}: do not trust these measurements.", detail, "bad")]
    words = f"The bounds of Prop. 4.2 hold at the logits of all {counted(b.num_tokens, 'token')}."
    return [Finding("bounds", Verdict.FACT, words, detail)]
