"""Do Reweight and Lopti help in the paper's regime, and does it matter which tokens Lopti takes first?

    python -m analyses.paper.decision [--out figures] [--scale cpu]

Named before any of these runs was made (paper_repro.md): the number is sampled accuracy on test puzzles, mean of the
last three checkpoints, paired by seed; the contrasts are Reweight − GRPO, Lopti − GRPO and Lopti − random split, with
Holm's correction over the three. A difference is significant if its corrected p is below .05. A gain of +.07 or more,
the smallest effect of interest, is excluded if the interval, corrected over the three (each at 1 − .05 / 3), lies below
it. If the pooled spread of the three gives a half-width of the 95 % interval above .05 with 12 seeds, more are made, up
to 24; only that spread decides, and nothing is concluded before all three have these seeds. Other methods are shown for
comparison and claim nothing.

For a pretrained policy on word problems (--scale words, --out figures/words) the contrasts are Reweight − GRPO and
Lopti − GRPO alone, corrected over the two, with 8 seeds, or 12 if that half-width is above .043. The random split is
run only if Lopti's corrected interval excludes 0 (split_asked).

Writes decision.png, decision_accuracy.csv (each method's mean), and decision.csv, which also has the smallest true
difference detectable with a probability of .8, and in every row the seeds that the rule asks for (seeds_asked, by
half_width). At scale words the names are decision_words….
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
from analyses.common.read_runs import pages, read_tests
from analyses.common.script import Options, exit_with
from analyses.common.tables import write_csv
from analyses.paper.fig4 import PAPER
from gradscope.errors import InputError
from gradscope.plots import NEUTRAL, finish, paper_style, save_figure

SMALLEST = 0.07
"""Smallest effect of interest."""
NOT_YET = "not decided yet"


@dataclass(frozen=True)
class Plan:
    """What was named beforehand for a scale's runs."""

    named: Sequence[tuple[str, str]]
    beside: Sequence[tuple[str, str]]
    """Contrasts that claim nothing."""
    half_width: float
    """Half-width of the 95 % interval above which more seeds are made."""
    seeds: Sequence[int]
    """Numbers of seeds the rule may ask for, given the spread over the first of them."""
    steps: tuple[int, ...]
    """Checkpoints whose mean is compared."""


PLANS = {
    "cpu": Plan(
        named=[("reweight", "grpo"), ("lopti", "grpo"), ("lopti", "random-split")],
        beside=[(name, "grpo") for name in ("random-split", "both", "high-entropy", "up-weight", "twice-the-steps")],
        half_width=0.05,
        seeds=range(12, 25),
        steps=(100, 125, 150),
    ),
    "words": Plan(
        named=[("reweight", "grpo"), ("lopti", "grpo")],
        beside=[("lopti", "random-split"), ("random-split", "grpo")],
        half_width=0.043,
        seeds=(8, 12),
        steps=(40, 50, 60),
    ),
}


def contrast(runs: pd.DataFrame, plan: Plan) -> pd.DataFrame:
    """Return a row per contrast, the named ones first.

    Columns: those of `contrasts.compare`, named, corrected_lower and corrected_upper, gain_excluded, smallest_told,
    verdict; for contrasts that were not named, corrected columns are NaN, nothing is excluded, and there is no verdict.

    runs: a row per variant and seed with the column `sampled`. Nothing differs and nothing is excluded until all named
    contrasts have the seeds that the rule asks for.
    """
    named = holm(differences(runs, "sampled", plan.named)).assign(named=True)
    whole = bool((named["seeds"] >= (count_seeds(runs, plan) or np.inf)).all())
    named["differs"] &= whole
    level = 1 - (1 - LEVEL) / len(plan.named)
    half = stats.t.ppf((1 + level) / 2, named["seeds"] - 1) * spread(named) / np.sqrt(named["seeds"])
    named["corrected_lower"], named["corrected_upper"] = named["difference"] - half, named["difference"] + half
    named["gain_excluded"] = whole & (named["corrected_upper"] < SMALLEST)
    named["smallest_told"] = [smallest_told(row, claims=len(plan.named)) for _, row in named.iterrows()]
    named["verdict"] = [judge(row) if whole else NOT_YET for _, row in named.iterrows()]
    beside = differences(runs, "sampled", plan.beside).assign(named=False, differs=False, gain_excluded=False)
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


def asks_split(contrasts: pd.DataFrame) -> bool:
    """Return whether Lopti's corrected interval excludes 0, so that the random split has to be run."""
    [row] = contrasts.query("variant == 'lopti' and baseline == 'grpo'").to_dict("records")
    return row["verdict"] != NOT_YET and (row["corrected_lower"] > 0 or row["corrected_upper"] < 0)


def count_seeds(runs: pd.DataFrame, plan: Plan) -> int | None:
    """Return the seeds that the rule asks for, given the named contrasts' pooled spread; None if too few are there."""
    widths = half_widths(runs, plan)
    return next((n for n, half in widths.items() if half <= plan.half_width), plan.seeds[-1]) if widths else None


def half_widths(runs: pd.DataFrame, plan: Plan) -> dict[int, float]:
    """Return the half-width of a 95 % interval by the number of first seeds: what the rule looks at.

    Empty if seeds are missing.
    """
    least = plan.seeds[0]
    first = differences(runs[runs["seed"] < least], "sampled", plan.named)
    if (first["seeds"] < least).any():
        return {}
    pooled = sqrt((spread(first) ** 2).mean())
    return {n: half_width(pooled, n) for n in plan.seeds}


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
    count = {2: "two", 3: "three"}[int(contrasts["named"].sum())]
    figure.supxlabel(
        f"The {count} on top were named beforehand. Thick: 95 % t interval over seeds; thin: corrected over these."
        "\nDashed: the smallest effect of interest, +.07. ×: the paper's difference, 3 B, on puzzles.",
        fontsize=7,
    )
    finish(ax, shown)
    return figure


def main(options: Options) -> None:
    if options.scale not in PLANS:
        raise InputError(f"--scale is {options.scale}; contrasts were named for {' and '.join(PLANS)} alone")
    plan = PLANS[options.scale]
    for name, track, variants in pages("decision", options.scale):
        accuracy = accuracy_by_people(read_tests(variants, scale=options.scale, track=track), plan.steps)
        runs = accuracy[accuracy["level"] == "all"]
        rule = {"seeds_asked": count_seeds(runs, plan), "half_width": half_widths(runs, plan).get(plan.seeds[0])}
        contrasts = contrast(runs, plan).assign(**rule)
        if ("lopti", "random-split") in plan.beside:
            contrasts["split_asked"] = asks_split(contrasts)
        save_figure(draw(contrasts), options.out / f"{name}.png", contrasts)
        write_csv(summarize(runs, "sampled"), options.out / f"{name}_accuracy.csv")
        print(contrasts.to_string(index=False, float_format="{:.3f}".format, na_rep="–"))


if __name__ == "__main__":
    exit_with(lambda: main(tyro.cli(Options, description=__doc__)))
