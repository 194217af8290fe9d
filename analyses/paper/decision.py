"""Do Reweight and Lopti help in the paper's regime, and does it matter which tokens Lopti takes first?

    python -m analyses.paper.decision [--out figures]

Named before any of these runs was made (docs/preregistrations.md): the number is sampled accuracy on test puzzles, mean
of the last three checkpoints, paired by seed; the contrasts are Reweight − GRPO, Lopti − GRPO and Lopti − random split,
with Holm's correction over the three. A difference is significant if its corrected p is below .05. A gain of +.07 or
more, the smallest effect of interest, is excluded if the interval, corrected over the three (each at 1 − .05 / 3), lies
below it. If the pooled spread of the three gives a half-width of the 95 % interval above .05 with 12 seeds, more are
made, up to 24; only that spread decides, and nothing is concluded before all three have these seeds. Other methods are
shown for comparison and claim nothing.

Writes decision.png, decision_accuracy.csv (each method's mean), and decision.csv, which also has the smallest true
difference detectable with a probability of .8, and in every row the seeds that the rule asks for (seeds_asked, by
half_width).
"""

from __future__ import annotations

from math import sqrt

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import tyro
from matplotlib.figure import Figure
from matplotlib.ticker import MultipleLocator
from scipy import stats

from analyses.common.accuracy import accuracy_by_people
from analyses.common.colors import COLORS
from analyses.common.contrasts import LEVEL, differences, half_width, holm, smallest_told, spread, summarize
from analyses.common.experiments import labels
from analyses.common.places import save_picture
from analyses.common.read_runs import pages, read_tests
from analyses.common.script import Options, exit_with
from analyses.common.tables import write_csv
from analyses.paper.fig4 import PAPER
from gradscope.plots import NEUTRAL, finish, headline, paper_style

SMALLEST = 0.07
"""Smallest effect of interest."""
NOT_YET = "not decided yet"
NAMED = [("reweight", "grpo"), ("lopti", "grpo"), ("lopti", "random-split")]
"""Contrasts named beforehand."""
BESIDE = [(name, "grpo") for name in ("random-split", "both", "high-entropy", "up-weight", "twice-the-steps")]
"""Contrasts that claim nothing."""
WIDEST = 0.05
"""Half-width of the 95 % interval above which more seeds are made."""
SEEDS = range(12, 25)
"""Numbers of seeds the rule may ask for, given the spread over the first of them."""
STEPS = (100, 125, 150)
"""Checkpoints whose mean is compared."""


def contrast(runs: pd.DataFrame) -> pd.DataFrame:
    """Return a row per contrast, the named ones first.

    Columns: those of `contrasts.compare`, named, corrected_lower and corrected_upper, gain_excluded, smallest_told,
    verdict; for contrasts that were not named, corrected columns are NaN, nothing is excluded, and there is no verdict.

    runs: a row per variant and seed with the column `sampled`. Nothing differs and nothing is excluded until all named
    contrasts have the seeds that the rule asks for.
    """
    named = holm(differences(runs, "sampled", NAMED)).assign(named=True)
    whole = bool((named["seeds"] >= (count_seeds(runs) or np.inf)).all())
    named["differs"] &= whole
    level = 1 - (1 - LEVEL) / len(NAMED)
    half = stats.t.ppf((1 + level) / 2, named["seeds"] - 1) * spread(named) / np.sqrt(named["seeds"])
    named["corrected_lower"], named["corrected_upper"] = named["difference"] - half, named["difference"] + half
    named["gain_excluded"] = whole & (named["corrected_upper"] < SMALLEST)
    named["smallest_told"] = [smallest_told(row, claims=len(NAMED)) for _, row in named.iterrows()]
    named["verdict"] = [judge(row) if whole else NOT_YET for _, row in named.iterrows()]
    beside = differences(runs, "sampled", BESIDE).assign(named=False, differs=False, gain_excluded=False)
    return pd.concat([named, beside], ignore_index=True)


def judge(row: pd.Series) -> str:
    """Return a named contrast's verdict; every case was worded before any difference was looked at."""
    if row["differs"] and row["difference"] < 0:
        return "lower"
    if row["differs"]:
        size = {True: ", by less than .07", False: ", by more than .07"}
        apart = row["gain_excluded"] or row["corrected_lower"] > SMALLEST
        return "higher" + (size[bool(row["gain_excluded"])] if apart else "")
    return "no difference shown, " + ("a gain of .07 or more excluded" if row["gain_excluded"] else "none excluded")


def count_seeds(runs: pd.DataFrame) -> int | None:
    """Return the seeds that the rule asks for, given the named contrasts' pooled spread; None if too few are there."""
    widths = half_widths(runs)
    return next((n for n, half in widths.items() if half <= WIDEST), SEEDS[-1]) if widths else None


def half_widths(runs: pd.DataFrame) -> dict[int, float]:
    """Return the half-width of a 95 % interval by the number of first seeds: what the rule looks at.

    Empty if seeds are missing.
    """
    least = SEEDS[0]
    first = differences(runs[runs["seed"] < least], "sampled", NAMED)
    if (first["seeds"] < least).any():
        return {}
    pooled = sqrt((spread(first) ** 2).mean())
    return {n: half_width(pooled, n) for n in SEEDS}


@paper_style()
def draw(contrasts: pd.DataFrame) -> Figure:
    """Draw a row per contrast, the named ones on top, with 95 % intervals and, thin, the corrected ones."""
    shown = contrasts[contrasts["seeds"] > 1].reset_index(drop=True)
    figure, ax = plt.subplots(figsize=(5.6, 0.9 + 0.34 * len(shown)), layout="constrained")
    words, paper = labels(), PAPER["Qwen2.5-3B-Instruct"]
    places = shown.index + 0.6 * ~shown["named"]
    for place, row in zip(places, shown.itertuples(), strict=True):
        color = COLORS[row.variant]
        ax.hlines(place, row.corrected_lower, row.corrected_upper, color=color, lw=0.7)
        ax.hlines(place, row.lower, row.upper, color=color, lw=2)
        ax.plot(row.difference, place, "o", color=color, ms=4.5)
        if row.baseline == "grpo" and row.variant in paper:
            ax.plot(paper[row.variant][5] - paper["grpo"][5], place, "x", color=NEUTRAL, ms=4.5)
    ax.axvline(0, color=NEUTRAL, lw=0.7, zorder=0)
    ax.axvline(SMALLEST, color=NEUTRAL, lw=0.7, ls="--", zorder=0)
    names = [f"{words[row.variant]} − {words[row.baseline]} ({row.seeds} seeds)" for row in shown.itertuples()]
    ax.set_yticks(places, names, fontsize=7.5)
    ax.tick_params(axis="y", length=0)
    ax.invert_yaxis()
    ax.set_xlabel("difference in sampled accuracy")
    ax.xaxis.set_major_locator(MultipleLocator(0.05))
    headline(
        figure,
        "",
        "The three on top were named beforehand. Thick: 95 % t interval over seeds; thin: corrected over these."
        "\nDashed: the smallest effect of interest, +.07. ×: the paper's difference, 3 B, on puzzles.",
    )
    finish(ax, shown)
    return figure


def main(options: Options) -> None:
    for name, track, variants in pages("decision", options.scale):
        accuracy = accuracy_by_people(read_tests(variants, scale=options.scale, track=track), STEPS)
        runs = accuracy[accuracy["level"] == "all"]
        rule = {"seeds_asked": count_seeds(runs), "half_width": half_widths(runs).get(SEEDS[0])}
        contrasts = contrast(runs).assign(**rule)
        save_picture(draw(contrasts), options.at(f"{name}.png"), contrasts)
        write_csv(summarize(runs, "sampled"), options.at(f"{name}_accuracy.csv"))
        print(contrasts.to_string(index=False, float_format="{:.3f}".format, na_rep="–"))


if __name__ == "__main__":
    exit_with(lambda: main(tyro.cli(Options, description=__doc__)))
