"""A diagnosis in plain sentences, each with its numbers, interval and denominator, and no more than these bear."""

from __future__ import annotations

from collections.abc import Callable
from math import isnan

import numpy as np
import pandas as pd

from gradscope.diagnosis_result import Diagnosis
from gradscope.gains import PARAMETERS

Finding = tuple[str, str, str]
"""Statement, detail, and tone: plain, good, warn or bad."""

DEFINITIONS = {
    "interval of π": (
        "Response tokens are sorted by π, the probability that the policy gives the token at the sampling temperature, "
        "into [0, ¼), [¼, ½), [½, ¾) and [¾, 1]: fixed edges, not quantiles."
    ),
    "share of the tokens": "An interval's response tokens over all response tokens of the rollouts.",
    "w": (
        "The weight of a token in the loss's gradient (Eq. 2 of the paper): the clipped ratio times the advantage, plus "
        "the KL term's part. A token whose group has equal rewards has weight 0 there."
    ),
    "share of Σ‖w·g‖²": (
        "g is the gradient of one token's own log π over all parameters. The squares of ‖w·g‖ are added up over an "
        "interval's tokens and divided by the sum over all tokens. It asks how large tokens' gradients are one by one; "
        "it knows nothing of gradients that cancel."
    ),
    "share of the summed gradient": (
        "G_a is the gradient of the loss over an interval's tokens, G the whole gradient. The share is ⟨G_a, G⟩/‖G‖²: "
        "the part of G that the interval makes. Shares add up to 1 and may be negative. Another quantity than that of "
        "Σ‖w·g‖²: tokens whose gradients cancel have no part in it."
    ),
    "dominance index": (
        "log₂ of an interval's share of Σ‖w·g‖² over its share of the tokens, in bits: 0 is proportional, +1 twice, −1 "
        "half as much per token as the average token. Tokens dominate only where its 95 % interval lies above 0 and "
        "their interval holds the largest share of all; its largest possible value is −log₂(share of the tokens)."
    ),
    "what (1−π) alone predicts": (
        "The same index with |w|·(1−π) in the place of ‖w·g‖: if the network passed every token's gradient on alike. "
        "The difference of the two indices is what the network adds to the power of 1−π."
    ),
    "index of the summed gradients": (
        "log₂ of an interval's share of Σ_a ‖G_a‖² over its share of the tokens, in bits."
    ),
    "signal fraction": (
        "Prompts are taken as draws of one distribution. Signal is the unbiased estimate of ‖E G_a‖², the part of the "
        "squared norm that another batch of as many prompts shares, and noise the rest; the fraction is signal/‖G_a‖², "
        "about the cosine to be expected with the G_a of such another batch. The estimate can fall below 0."
    ),
    "AdamW's metric": (
        "Each gradient divided by √v̂ + eps, entry by entry, as the optimizer's next update divides it; v̂ is that of the "
        "whole step. Momentum of earlier steps and weight decay are left out."
    ),
    "who moves whom": (
        "To first order, a step changes each token's log π by a sum with a part per source: the gradients of the "
        "intervals, KL, momentum, decay. A source's share is Cov(its part, the whole)/Var(the whole) over the tokens "
        "that are moved; shares add up to 1 and may be negative. Intervals here are of π before the step."
    ),
    "right direction": (
        "Of the tokens with a positive advantage that moved, the share whose probability rose in the step; of those "
        "with a negative one, the share whose probability fell. One half is what chance would give. Responses that share "
        "a prefix and differ in reward pull the same token both ways, so some wrong directions are unavoidable."
    ),
    "bounds of Prop. 4.2": (
        "√(N/(N−1))·(1−π) ≤ ‖e − π‖ ≤ √2·(1−π) for the gradient with respect to the logits. A theorem: a violation "
        "would be a fault of the measurement."
    ),
    "policy lag": (
        "|log π − log π_old| of the policy here and the one that sampled, over tokens whose log π_old is in the rollouts, "
        "in nats; clipped low: Â < 0 and π/π_old < 1 − ε_low; clipped high: Â > 0 and π/π_old > 1 + ε_high. Shares of "
        "these tokens."
    ),
    "α and η": (
        "α of Advantage Reweighting and η of Lopti, screened by one predicted step on batches of whole prompts: half of "
        "them select the setting with the best right-direction score, the others confirm it. No one has shown that this "
        "score predicts a run's final accuracy."
    ),
    "95 % interval": (
        "Brackets hold percentiles of a bootstrap that redraws whole prompts. For signal they are a jackknife over "
        "prompts and for α and η Student's t over batches. They say what other prompts would give, from this checkpoint."
    ),
}
"""What the words of the findings mean, for a page to quote."""


def findings(diagnosis: Diagnosis) -> list[Finding]:
    """The sentences, the most telling first; a part that was not computed has none."""
    makers: tuple[Callable[[Diagnosis], list[Finding]], ...] = (
        _dominance, _added, _summed, _signal, _influence, _directions, _where, _driver, _spikes, _lag, _bounds, _try,
    )  # fmt: skip
    return [finding for make in makers for finding in make(diagnosis)]


def percent(value: float) -> str:
    """A share in percent, without the sign.

    >>> [percent(v) for v in (0.4793, 0.0139, 0.00021, -0.21, 1.0, 0.0)]
    ['48', '1.4', '0.021', '−21', '100', '0']
    """
    number = 100 * value
    if isnan(number):
        return "–"
    digits = f"{number:.0f}" if abs(number) >= 9.95 or number == 0 else f"{number:.1f}"
    if 0 < abs(number) < 0.95:
        digits = f"{number:.2g}" if abs(number) >= 1e-3 else "0.00"
    return digits.replace("-", "−")


def share_words(row: pd.Series) -> str:
    """A share with its interval.

    >>> share_words(pd.Series({"value": 0.48, "lower": 0.27, "upper": 0.64}))
    '48 % [27, 64]'
    """
    bounds = "" if isnan(row["lower"]) else f" [{percent(row['lower'])}, {percent(row['upper'])}]"
    return f"{percent(row['value'])} %{bounds}"


def bits_words(row: pd.Series) -> str:
    """A signed number of bits with its interval.

    >>> bits_words(pd.Series({"value": -0.6, "lower": -1.23, "upper": 0.16}))
    '−0.6 bits [−1.2, +0.2]'
    """
    bounds = "" if isnan(row["lower"]) else f" [{row['lower']:+.1f}, {row['upper']:+.1f}]"
    return f"{row['value']:+.1f} bits{bounds}".replace("-", "−")


def _dominance(d: Diagnosis) -> list[Finding]:
    low = d.labels[0]
    tokens, index = d.pick("token_share", "none", low), d.pick("dominance_index", "raw", low)
    if index is None:
        return [("Dominance is not known: the rollouts give no weights.", " ".join(d.notes), "plain")]
    if not tokens["n"]:
        return [(f"No token has π in {low}, so there is nothing that could dominate.", "", "plain")]
    found = [_dominance_in(d, "raw", "")]
    if d.pick("dominance_index", "adamw", low) is not None:
        found.append(_dominance_in(d, "adamw", " in AdamW's metric"))
    return found


def _dominance_in(d: Diagnosis, metric: str, words: str) -> Finding:
    low = d.labels[0]
    tokens, index, share = (
        d.pick(*key, low) for key in (("token_share", "none"), ("dominance_index", metric), ("squared_share", metric))
    )
    if isnan(index["value"]):
        return (f"How much of Σ‖w·g‖²{words} tokens with π in {low} hold is not known.", "", "plain")
    holds = f"they are {share_words(tokens)} of the tokens and hold {share_words(share)} of Σ‖w·g‖²{words}"
    shares = [d.pick("squared_share", metric, label) for label in d.labels]
    each = ", ".join(
        f"{label} {share_words(row)}" for label, row in zip(d.labels, shares, strict=True) if not isnan(row["value"])
    )
    times = f"{2.0 ** index['value']:.3g} times the average token's"
    detail = f"Dominance index {bits_words(index)}: their mean ‖w·g‖² is {times}. Of Σ‖w·g‖²: {each}."
    largest = share["value"] >= max(row["value"] for row in shares if not isnan(row["value"]))
    if isnan(index["lower"]):
        return (f"Tokens with π in {low}: {holds}; one prompt gives no interval, so no verdict.", detail, "plain")
    if index["lower"] > 0 and largest:
        return (f"Low-probability tokens (π in {low}) dominate{words}: {holds}.", detail, "warn")
    if index["lower"] > 0:
        return (f"Tokens with π in {low} weigh more than their number, but another interval holds more: {holds}.",
                detail, "plain")  # fmt: skip
    if index["upper"] < 0:
        return (
            f"Low-probability tokens (π in {low}) do not dominate: {holds}, less than their number.",
            detail,
            "good",
        )
    return (f"Cannot tell whether low-probability tokens (π in {low}) dominate: {holds}.", detail, "plain")


def _added(d: Diagnosis) -> list[Finding]:
    low = d.labels[0]
    added, alone = d.pick("added_index", "raw", low), d.pick("predicted_index", "none", low)
    if added is None or isnan(added["lower"]):
        return []
    detail = f"(1−π) alone predicts an index of {bits_words(alone)}; measured minus predicted: {bits_words(added)}."
    if added["lower"] > 0:
        return [(f"The network makes tokens with π in {low} weigh more than 1−π alone would.", detail, "plain")]
    if added["upper"] < 0:
        return [(f"The network makes tokens with π in {low} weigh less than 1−π alone would.", detail, "plain")]
    return [(f"The weight of tokens with π in {low} cannot be told from what 1−π alone predicts.", detail, "plain")]


def _summed(d: Diagnosis) -> list[Finding]:
    found = []
    for metric, words in (("raw", "this batch's summed gradient"), ("adamw", "the same in AdamW's metric")):
        low = d.labels[0]
        share, index = d.pick("gradient_share", metric, low), d.pick("gradient_index", metric, low)
        cosine, tokens = d.pick("cosine_with_all", metric, low), d.pick("token_share", "none", low)
        if share is None or isnan(share["value"]):
            continue
        statement = (
            f"Of {words}, ⟨G_a, G⟩/‖G‖², tokens with π in {low} make {share_words(share)}, being {share_words(tokens)} "
            "of the tokens."
        )
        each = [(label, d.pick("gradient_share", metric, label)) for label in d.labels]
        shares = ", ".join(f"{label} {share_words(row)}" for label, row in each if not isnan(row["value"]))
        detail = f"All intervals: {shares}. Index of the summed gradients {bits_words(index)}; cosine of G_a with G "
        detail += f"{_number(cosine)}."
        more = share["lower"] > tokens["upper"]
        if not (more or share["upper"] < tokens["lower"]):
            statement += " Whether that is more than their number, this batch cannot tell."
        found.append((statement, detail, "warn" if more else "plain"))
    return found


def _signal(d: Diagnosis) -> list[Finding]:
    rows = [(label, d.pick("signal_fraction", "raw", label)) for label in (*d.labels, "all")]
    known = [(label, row) for label, row in rows if row is not None and not isnan(row["lower"])]
    if not known:
        return []
    each = ", ".join(f"{'all tokens' if name == 'all' else name} {share_words(row)}" for name, row in known)
    detail = f"Signal fraction of ‖G_a‖², over {d.num_prompts} prompts: {each}. Below 0 is chance."
    clear = [name for name, row in known if row["lower"] > 0]
    names = ", ".join("all tokens together" if name == "all" else name for name in clear)
    low = d.labels[0]
    if not clear:
        return [("In no interval can the summed gradient's signal be told from noise: other prompts may give another "
                 "gradient.", detail, "warn")]  # fmt: skip
    statement = f"The summed gradient has a signal that other prompts share for {names}"
    missing = low not in clear and low in dict(known)
    statement += f"; for π in {low} it cannot be told from noise." if missing else "."
    return [(statement, detail, "warn" if missing else "plain")]


def _influence(d: Diagnosis) -> list[Finding]:
    low, top = d.labels[0], d.labels[-1]
    share, own = d.pick("low_to_high_share", "none", top), d.pick("high_to_high_share", "none", top)
    if share is None or isnan(share["value"]):
        return []
    statement = (
        f"In a {_step_words(d)} step, to first order, tokens with π in {low} cause {share_words(share)} of how tokens with "
        f"π in {top} move."
    )
    detail = f"Of the variance of their predicted Δ log π, over {share['n']:,} tokens; their own interval causes "
    more = share["lower"] > own["upper"]
    return [(statement, f"{detail}{share_words(own)}.", "warn" if more else "plain")]


def _directions(d: Diagnosis) -> list[Finding]:
    found = []
    for sign, word, way in (("positive", "Â > 0", "rose"), ("negative", "Â < 0", "fell")):
        kind = "actual" if d.pick(f"right_direction_{sign}_actual", "none", "all") is not None else "predicted"
        name = f"right_direction_{sign}_{kind}"
        row = d.pick(name, "none", "all")
        if row is None or isnan(row["value"]):
            continue
        done = f"In one {_step_words(d)} step on this batch" if kind == "actual" else "In one predicted step"
        statement = f"{done}, {share_words(row)} of the {row['n']:,} tokens with {word} that moved {way}"
        each = [(label, d.pick(name, "none", label)) for label in d.labels]
        parts = ", ".join(f"{label} {share_words(r)} of {r['n']:,}" for label, r in each if not isnan(r["value"]))
        tone, end = "plain", ": not to be told from one half."
        if row["lower"] > 0.5:
            tone, end = "good", ", more than half."
        elif row["upper"] < 0.5:
            tone, end = "bad", ", less than half."
        elif isnan(row["lower"]):
            end = "."
        found.append((statement + end, f"By interval of π before the step: {parts}.", tone))
    return found


def _where(d: Diagnosis) -> list[Finding]:
    if d.where is None:
        return []
    found = []
    for driver, words in (("token_class", "by kind of token"), ("position_bin", "by position in the response")):
        rows = d.where[(d.where["driver"] == driver) & d.where["squared_share"].notna()]
        if len(rows) < 2:
            continue
        each = ", ".join(f"{r['value']} {_squared(r)} ({_tokens(r)} of the tokens)" for _, r in rows.iterrows())
        over = rows[rows["squared_lower"] > rows["token_upper"]]
        names = ", ".join(f"{r['value']} ({_squared(r)} against {_tokens(r)})" for _, r in over.iterrows())
        statement = f"Σ‖w·g‖² {words}: no value's share can be told to be above its share of the tokens."
        if len(over):
            statement = f"Σ‖w·g‖² {words}: more than their share of the tokens have {names}."
        found.append((statement, f"Of Σ‖w·g‖²: {each}.", "plain"))
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
        return [
            ("Probability and entropy go together too closely here to say which of them norms follow.", "", "plain")
        ]
    if isnan(row["lower"]):
        return []
    fits = ", ".join(
        f"{word} {_number(rows.loc[name].rename({'coefficient': 'value'}))}"
        for name, word in zip(names, ("log(1−π)", "entropy"), strict=True)
    )
    detail = f"Standardised coefficients of the log norm over all parameters, {row['tokens']:,} tokens that are not "
    detail += f"nearly certain: {fits}; R² of both {row['r2']:.2f}."
    words = "cannot be told to follow probability or entropy more"
    if row["lower"] > 0:
        words = "follow probability more than entropy"
    elif row["upper"] < 0:
        words = "follow entropy more than probability"
    return [(f"Norms of single tokens {words}.", detail, "plain")]


def _spikes(d: Diagnosis) -> list[Finding]:
    if d.spikes is None or d.spikes.empty:
        return []
    first, measured = d.spikes.iloc[0], int(d.table[PARAMETERS].notna().sum())
    statement = (
        f"The {len(d.spikes)} largest of the {measured:,} measured tokens hold {percent(d.spikes['squared_share'].sum())} "
        "% of Σ‖w·g‖² over these."
    )
    where = f"token {first['token']!r} at position {first['position']} of response {first['response']}"
    detail = f"The largest: {where}, π {first['prob']:.2g}, weight {first['weight']:+.2g}, with "
    return [(statement, f"{detail}{percent(first['squared_share'])} %. A fact of this batch, not of others.", "plain")]


def _lag(d: Diagnosis) -> list[Finding]:
    mean, worst = d.pick("logprob_difference_mean"), d.pick("logprob_difference_max")
    if mean is None:
        return []
    low, high, dual = (d.pick(f"clip_{name}") for name in ("low", "high", "dual"))
    statement = (
        f"The policy is {_number(mean, '.2g')} nats from the one that sampled (mean |Δ log π|; at most "
        f"{worst['value']:.2g})."
    )
    if isnan(low["value"]):
        return [(statement, f"Over {mean['n']:,} tokens.", "plain")]
    detail = (
        f"Of {low['n']:,} tokens, clipped low {share_words(low)}, clipped high {share_words(high)}, by the dual clip "
    )
    return [(statement, f"{detail}{share_words(dual)}.", "plain")]


def _bounds(d: Diagnosis) -> list[Finding]:
    if d.bounds is None or not d.bounds.num_tokens:
        return []
    b = d.bounds
    detail = (
        f"Smallest distance of a norm from the lower bound {b.lower_margin:.1e} and from the upper {b.upper_margin:.1e}, "
        f"relative; rounding is granted {b.tolerance:.0e} at most."
    ).replace("-", "−")
    if b.violations:
        words = f"The bounds of Prop. 4.2 break on {b.violations:,} of {b.num_tokens:,} tokens: do not trust this."
        return [(words, detail, "bad")]
    return [(f"The bounds of Prop. 4.2 hold at the logits of all {b.num_tokens:,} tokens.", detail, "good")]


def _try(d: Diagnosis) -> list[Finding]:
    if (best := d.recommendation) is None:
        return []
    detail = (
        f"One {_step_words(d)} step predicted to first order on {best.num_batches} batches of "
        f"{min(best.prompts_per_batch)} to {max(best.prompts_per_batch)} prompts, {len(best.settings)} settings."
    )
    if not best.eta_judged:
        detail += " η is not judged: to first order its two steps are plain's one."
    if best.setting == "plain":
        return [("No α or η has a better predicted right-direction score than the plain loss: nothing to try.", detail,
                 "plain")]  # fmt: skip
    row = pd.Series({"value": best.difference, "lower": best.lower, "upper": best.upper})
    points = f"{100 * best.difference:+.2f} points [{100 * row['lower']:+.2f}, {100 * row['upper']:+.2f}]"
    words = f"{best.setting} scores {points} against the plain loss on held-out prompts".replace("-", "−")
    end = {
        "better": ": worth a run.", "worse": ": no reason for a run.",
        "no difference": ": no difference can be told.", "undecided": ": too few batches for a verdict.",
    }[best.verdict]  # fmt: skip
    return [(words + end, detail, "good" if best.verdict == "better" else "plain")]


def _step_words(d: Diagnosis) -> str:
    return "AdamW" if d.step.optimizer == "adamw" else "SGD"


def _number(row: pd.Series, form: str = ".2f") -> str:
    """A number with its interval."""
    bounds = "" if np.isnan(row["lower"]) else f" [{row['lower']:{form}}, {row['upper']:{form}}]"
    return f"{row['value']:{form}}{bounds}".replace("-", "−")
