"""Whose the summed gradient is: each interval's share of it, its norm and its cosine with the whole."""

from __future__ import annotations

from math import isnan

import pandas as pd

from gradscope import plots
from gradscope.diagnosis.findings import Finding, Verdict, judge, lack_words
from gradscope.diagnosis.format import number_words, says_nothing, share_words
from gradscope.diagnosis.measured import Measured
from gradscope.diagnosis.page.page import Block
from gradscope.diagnosis.page.sheets import TOKENS, Sheets, csv, define, redraw
from gradscope.diagnosis.result import Diagnosis
from gradscope.diagnosis.rows import Rows, join_rows
from gradscope.diagnosis.sums import sum_rows
from gradscope.intervals import name_interval
from gradscope.runs import counted

TITLE = "Tokens, advantages, summed gradients"
ASKS = ("table", "sums")
FOLLOWED = {
    ("gradient_share", "raw"): ("share of summed gradient", "The share of the summed gradient of tokens with {}"),
}
LABELS = {
    "gradient_norm": "norm of the summed gradient",
    "gradient_index": "index of the summed gradients",
    "cosine_with_all": "cosine with the whole gradient",
}
DEFINITIONS = {
    "summed gradient": (
        "G_a is the gradient of the loss over an interval's tokens, G the whole gradient. An interval's share is "
        "⟨G_a, G⟩/‖G‖². Shares add up to 100 % and may be negative. Unlike the gradient energy, gradients that cancel "
        "do not contribute."
    ),
    "index of the summed gradients": "log₂ of an interval's share of Σ_a ‖G_a‖² over its share of the tokens, in bits.",
}
METRICS = {"raw": "summed gradient", "adamw": "AdamW-preconditioned summed gradient"}


def rows(m: Measured) -> Rows:
    """The numbers of `sums.sum_rows`, in each metric; none without sums."""
    if (made := m.made.get("sums")) is None:
        return Rows()
    each = [
        sum_rows(gram, made.tokens, m.labels, metric=name, **m.draws(f"sums.{name}"))
        for name, gram in made.grams.items()
    ]
    return Rows(join_rows(each))


def say(found: Diagnosis) -> list[Finding]:
    """Say whether tokens of the lowest interval have more of the summed gradient than of the tokens."""
    if found.scope.supply.too_few:
        return []
    return [made for metric, words in METRICS.items() if (made := _judge(found, metric, words)) is not None]


def _judge(d: Diagnosis, metric: str, words: str) -> Finding | None:
    low, kind, supply = d.scope.low, f"summed_{metric}", d.scope.supply
    share, cosine = d.pick("gradient_share", metric, low), d.pick("cosine_with_all", metric, low)
    tokens = d.pick("token_share", "none", low)
    if share is None or tokens is None or isnan(share["value"]) or isnan(tokens["value"]):
        return None
    they, fewer = f"Tokens with {name_interval(low)}", not d.scope.all_summed
    if isnan(share["lower"]) and share["lacks"] == "prompts" and fewer:
        few = f"Too few prompts to say whose the {words} is: {d.scope.summed_prompts} were summed."
        return Finding(kind, Verdict.UNDECIDED, few)
    of = f"of the {words}{'' if d.scope.summed in (None, d.scope.of_prompts) else f' of {d.scope.summed_prompts}'}"
    if says_nothing(share):
        untold = f"How much {of} {they[0].lower()}{they[1:]} account for cannot be told from this batch."
        return Finding(kind, Verdict.UNDECIDED, untold)
    whose = f" of {counted(supply.prompts, 'prompt')}" if fewer else ""
    statement = f"{they}, {share_words(tokens)} of the tokens{whose}, account for {share_words(share)} {of}"
    brief = f"{they} account for {share_words(share)} {of}"
    others = ((label, d.pick("gradient_share", metric, label)) for label in d.labels[1:])
    each = "; ".join(f"{name_interval(label)}: {share_words(row)}" for label, row in others if not isnan(row["value"]))
    detail = f"Share ⟨G_a, G⟩/‖G‖² of the other intervals: {each}. Cosine of {name_interval(low)} with the whole: "
    detail += f"{number_words(cosine)}."
    verdict, why = judge(share, tokens), lack_words(share) or lack_words(tokens)
    end = {Verdict.MORE: ": more than in proportion.", Verdict.LESS: ": less than in proportion."}.get(
        verdict, f"; {why}." if why else ". Whether that is more than in proportion is undecided."
    )
    brief += end
    if metric == "raw":  # whose share the first screen has
        which = {Verdict.MORE: "a larger share", Verdict.LESS: "a smaller share"}.get(verdict)
        brief = f"{they} have {which} {of} than of the tokens."
        if which is None:
            brief = f"Whether {they[0].lower()}{they[1:]} have a larger share {of} than of the tokens is undecided"
            brief += f": {why}." if why else "."
    tone, about = "warn" if verdict is Verdict.MORE else "plain", (("gradient_share", metric, low),)
    return Finding(kind, verdict, f"{statement}{end}", detail, tone, brief, about=about)


def show(found: Diagnosis, sheets: Sheets) -> list[Block]:
    """Fig. 1 (a, b, d) of the paper, or (a) alone without sums."""
    edges = found.scope.settings.edges
    norms = found.statistics[
        (found.statistics["statistic"] == "gradient_norm") & (found.statistics["metric"] == "raw")
    ]
    if norms.empty:
        why = "need advantages" if not found.measured or not found.measured.weighted else "need summed gradients"
        words = f"Token shares (Fig. 1 a); the other panels {why}."
        again = redraw(plots.plot_token_shares, TOKENS, edges=edges)
        draw = lambda: plots.plot_token_shares(found.table, edges=edges)  # noqa: E731
        return [sheets.figure("figure_1", draw, words, again=again)]
    bars = pd.DataFrame(
        {"interval": [*map(str, range(len(found.labels))), "all"], "label": norms["interval"], "norm": norms["value"]}
    ).reset_index(drop=True)
    sheets.keep("gradient_norms", bars)
    drawn = sheets.figure(
        "figure_1",
        lambda: plots.plot_figure_1(found.table, bars, edges=edges),
        "Fig. 1 (a, b, d) of the paper on this batch: how probable the tokens were, their advantages, and the norm "
        f"of each interval's summed gradient, alone and together{found.scope.of_summed}. Norms are no shares: "
        "gradients cancel, and G_a of few tokens can be long by chance (see Signal).",
        again=redraw(plots.plot_figure_1, TOKENS, csv("gradient_norms"), edges=edges),
    )
    return [drawn, *define(DEFINITIONS)]
