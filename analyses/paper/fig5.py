"""Fig. 5 of the paper: six word categories, (a) their correlation with reward, (b) how often each method uses them.

    python -m analyses.paper.fig5 [--out figures] [--scale cpu]

(a) Pearson's correlation between a sampled response's number of words of a category (Table 5, analyses/paper/words.py)
and its reward, over GRPO's policies. Harder puzzles have longer responses and less reward, so there are two measures,
words per response and per 100 tokens, and three scopes: all responses; relative to the means of each level (number of
people); relative to the means of each puzzle, which compares only responses to the same puzzle. 95 % intervals are from
a bootstrap over puzzles and cover these policies on other puzzles. (b) Words per response of Reweight, Lopti and both
minus GRPO's: paired differences over seeds as a share of GRPO's mean at these seeds, 95 % t intervals. Everything drawn
is claimed; Holm's correction is over both panels' claims.

    fig5.csv                what is drawn
    fig5_correlations.csv   (a), and each level alone; p by the interval's width on Fisher's scale
    fig5_contrasts.csv      (b); p of a paired t test
    fig5_frequencies.csv    words per response and per 100 tokens of each method: mean over seeds, t interval

A category without words in the responses or in the policy's vocabulary is not in the policy's language: its numbers are
absent, not 0. embedded-certain writes "check" before its check of all claims and "so" before what follows from a claim;
its "if … then …" are copies of claims that it judges, while its own assumptions begin with "try".

Differs from the paper: the policy; 100 puzzles × 4 samples × seeds (embedded-certain: 200 × 2) in place of 500 × 8 of
one policy; the intervals, the second measure, the correlations within levels and puzzles. The paper's text has no
numbers, only the signs of (a) and (b).
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import pandas as pd
import tyro
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy import stats

from analyses.common import experiments
from analyses.common.accuracy import baseline_means
from analyses.common.colors import COLORS
from analyses.common.contrasts import differences, holm, summarize, tell_seeds
from analyses.common.places import save_picture
from analyses.common.read_runs import pages, read_responses
from analyses.common.script import Options, exit_with
from analyses.common.tables import write_csv
from analyses.paper.words import CATEGORIES, count_categories, embedded_categories
from gradscope.errors import InputError
from gradscope.plots import NEUTRAL, PAGE_WIDTH, finish, headline, new_panels, paper_style
from gradscope.policy import EMBEDDED
from gradscope.resampling import bootstrap

BASELINE = "grpo"
PAPER = {
    "Analysis": "+",
    "Statement": "+",
    "Causal Indicator": "+",
    "Conclusion Indicator": "−",
    "Assumption": "−",
    "Assertion": "−",
}
"""Sign of the correlation with reward (§ 5.1); the methods use the words more often if it is +, else less."""
MEASURES = ("words per response", "words per 100 tokens")
"""(b) draws the first."""
SCOPES = {"all responses": "o", "within levels": "s", "within puzzles": "D"}
"""{scope drawn in (a): its marker}."""
ABSENT = "not in this\npolicy's language"


@dataclass(frozen=True)
class Tables:
    """The figure's numbers, with p_holm and differs for rows that are claims."""

    correlations: pd.DataFrame
    """(a): a row per measure, scope and category."""
    contrasts: pd.DataFrame
    """(b): a row per method and category."""
    frequencies: pd.DataFrame
    """A row per measure, method and category."""


def table(scale: str, track: str, variants: list[str]) -> Tables:
    """Count the words of every sampled response, correlate them with reward, and contrast the methods."""
    responses = read_responses(variants, scale=scale, track=track)
    if BASELINE not in set(responses["variant"]):
        raise InputError(f"no run of {BASELINE} is there; make it: python -m analyses.reproduce --scale {scale}")
    model = experiments.configure(scale, track, BASELINE).model
    counted = count(responses, embedded_categories(model) if model in EMBEDDED else set())
    correlations = correlate_categories(counted[counted["variant"] == BASELINE], np.random.default_rng(0))
    per_seed = counted.groupby(["measure", "variant", "label", "category", "seed"], sort=False)["words"]
    means, others = per_seed.mean().reset_index(), [variant for variant in variants if variant != BASELINE]
    frequencies = summarize(means, "words", ("measure", "variant", "label", "category"))
    correlations, contrasts = correct(correlations, contrast(means[means["measure"] == MEASURES[0]], others))
    return Tables(correlations, contrasts, frequencies)


def count(responses: pd.DataFrame, writable: set[str]) -> pd.DataFrame:
    """Return a row per measure, sampled response and category: its words; NaN if the policy's language lacks them.

    writable: categories that the policy can write.
    """
    sampled = responses[~responses["greedy"]].astype({"level": int})
    counts = pd.DataFrame([count_categories(text) for text in sampled["response"]], sampled.index, dtype=float)
    absent = [category for category in counts if not counts[category].any() and category not in writable]
    counts[absent] = np.nan
    keys = ["variant", "label", "seed", "group", "level", "reward"]
    frames = []
    for measure, values in zip(MEASURES, (counts, counts.mul(100 / sampled["tokens"], axis=0)), strict=True):
        wide = pd.concat([sampled[keys], values], axis=1)
        frames.append(wide.melt(keys, var_name="category", value_name="words").assign(measure=measure))
    return pd.concat(frames, ignore_index=True)


def correlate_categories(counted: pd.DataFrame, rng: np.random.Generator) -> pd.DataFrame:
    """Return a row per measure, scope and category: the correlation with reward and its sample sizes."""
    rows = []
    for (measure, category), own in counted.groupby(["measure", "category"], sort=False):
        # Seeds are policies of their own: within a level or a puzzle, only one policy's responses are compared.
        strata = {"all responses": np.zeros(len(own), dtype=int)}
        for scope, column in (("within levels", "level"), ("within puzzles", "group")):
            strata[scope] = own.groupby(["seed", column]).ngroup().to_numpy()
        scopes = {scope: (own, stratum) for scope, stratum in strata.items()}
        for level, part in own.groupby("level"):
            scopes[f"{level} people"] = (part, np.zeros(len(part), dtype=int))
        for scope, (part, stratum) in scopes.items():
            words, rewards = part["words"].to_numpy(), part["reward"].to_numpy()
            found = correlate(words, rewards, part["group"].to_numpy(), stratum, rng=rng)
            row = {"measure": measure, "scope": scope, "category": category, "responses": len(part)}
            row |= {"puzzles": part["group"].nunique(), "seeds": part["seed"].nunique()}
            row |= dict(zip(("correlation", "lower", "upper"), found, strict=True))
            rows.append(row | {"paper": PAPER[category]})
    return pd.DataFrame(rows)


def correlate(
    x: np.ndarray, y: np.ndarray, clusters: np.ndarray, strata: np.ndarray, *, rng: np.random.Generator
) -> tuple[float, float, float]:
    """Return Pearson's correlation of x and y about their means in each stratum, with a 95 % bootstrap over clusters.

    clusters, strata: each entry's cluster and stratum. NaN if x or y does not vary in any stratum.
    """
    if np.isnan(x).any():
        return np.nan, np.nan, np.nan
    names, cluster = np.unique(clusters, return_inverse=True)
    kinds, stratum = np.unique(strata, return_inverse=True)
    cell, size = cluster * len(kinds) + stratum, len(names) * len(kinds)
    # In the middle of the data, so that sums of squares do not cancel.
    x, y = x - x.mean(), y - y.mean()
    terms = (np.ones_like(x), x, y, x * x, y * y, x * y)
    sums = [np.bincount(cell, term, minlength=size).reshape(len(names), len(kinds)) for term in terms]

    def evaluate(weights: np.ndarray) -> np.ndarray:
        n, x, y, xx, yy, xy = (weights @ term for term in sums)
        n = np.maximum(n, 1)  # A stratum that was not drawn: all its sums are 0.
        var_x, var_y = (xx - x * x / n).sum(1), (yy - y * y / n).sum(1)
        varies = (var_x > 1e-9 * xx.sum(1)) & (var_y > 1e-9 * yy.sum(1))
        scale = np.sqrt(np.where(varies, var_x * var_y, np.nan))
        return ((xy - x * y / n).sum(1) / scale)[:, None]

    value, lower, upper = bootstrap(evaluate, len(names), seed=rng)[:, 0]
    return float(value), float(lower), float(upper)


def contrast(means: pd.DataFrame, methods: list[str]) -> pd.DataFrame:
    """Return a row per category and method, run or not: its words minus GRPO's, relative to GRPO's mean.

    means: words by variant, category and seed; differences and means are over common seeds.
    """
    frames, told = [], ["difference", "lower", "upper"]
    for category, own in means.groupby("category", sort=False):
        found = differences(own.dropna(), "words", [(method, BASELINE) for method in methods])
        found[told] = found[told].div(baseline_means(found, own, "words"), axis=0)
        frames.append(found.assign(category=category, paper=PAPER[category]))
    return pd.concat(frames, ignore_index=True)


def correct(correlations: pd.DataFrame, contrasts: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Add p, p_holm and differs to both, corrected over all that is drawn, which is all that is claimed."""
    p = fisher_p(correlations["correlation"], correlations["lower"], correlations["upper"])
    correlations = correlations.assign(p=np.where(correlations["scope"].isin(SCOPES), p, np.nan))
    both = holm(pd.concat([correlations[["p"]], contrasts.reindex(columns=["p"])], ignore_index=True))
    first = both.iloc[: len(correlations)][["p_holm", "differs"]]
    second = both.iloc[len(correlations) :][["p_holm", "differs"]].set_axis(contrasts.index)
    return pd.concat([correlations, first], axis=1), pd.concat([contrasts, second], axis=1)


def fisher_p(value: pd.Series, lower: pd.Series, upper: pd.Series) -> np.ndarray:
    """Return the two-sided p that correlations are 0: normal on Fisher's scale, with their intervals' width."""
    low, middle, high = (np.arctanh(np.clip(bound, -1 + 1e-12, 1 - 1e-12)) for bound in (lower, value, upper))
    return 2 * stats.norm.sf(np.abs(middle) / ((high - low) / (2 * stats.norm.ppf(0.975))))


@paper_style()
def draw(tables: Tables) -> Figure:
    """Draw (a) by both measures, then (b); categories from top to bottom, the paper's signs at the right."""
    figure, panels = new_panels(3, width=PAGE_WIDTH / 3, height=2.4)
    panels[1].sharex(panels[0])
    for ax, measure, letter in zip(panels, MEASURES, ("a", "a'"), strict=False):
        own = tables.correlations[tables.correlations["measure"] == measure]
        own = own[own["scope"].isin(SCOPES)].rename(columns={"correlation": "value"})
        _draw_rows(ax, [(own[own["scope"] == scope], scope, NEUTRAL, marker) for scope, marker in SCOPES.items()])
        ax.set(title=f"({letter}) {measure.capitalize()}\nand reward, GRPO", xlabel="Pearson's correlation")
        finish(ax, own)
    own, labels = tables.contrasts.rename(columns={"difference": "value"}), experiments.labels()
    variants = list(dict.fromkeys(own["variant"]))
    _draw_rows(panels[2], [(own[own["variant"] == v], labels[v], COLORS[v], "o") for v in variants])
    panels[2].set(title="(b) Words per response\nless GRPO's", xlabel="share of GRPO's")
    finish(panels[2], own)
    for ax in panels[1:]:
        ax.set_yticklabels([])
    handles = [
        *zip(*panels[0].get_legend_handles_labels(), strict=True),
        *zip(*panels[2].get_legend_handles_labels(), strict=True),
    ]
    figure.legend(
        *zip(*handles, strict=True), loc="outside upper center", ncols=len(handles), columnspacing=1
    )
    rested = tables.correlations.iloc[0]
    there = known(tables.correlations.rename(columns={"correlation": "value"}))
    absent = ", ".join(name for name in CATEGORIES if name not in there)
    return headline(
        figure,
        "",
        f"(a, a') {rested['responses']:,} samples: {rested['puzzles']} puzzles, {tell_seeds([rested['seeds']])}; 95 % "
        f"bootstrap over puzzles. (b) 95 % t over {tell_seeds(own['seeds'])}. +, −: the paper's signs"
        + (f". Not in this policy's language: {absent}" if absent else ""),
    )


def known(rows: pd.DataFrame) -> set[str]:
    """Return the categories that occur."""
    return set(rows.loc[rows["value"].notna(), "category"])


def _draw_rows(ax: Axes, series: list[tuple[pd.DataFrame, str, str, str]]) -> None:
    """Draw a point with its interval per category that occurs and series (rows, label, colour, marker)."""
    names = [name for name in CATEGORIES if any(name in known(rows) for rows, *_ in series)]
    for number, (rows, label, color, marker) in enumerate(series):
        rows = rows[rows["category"].isin(names)]
        places = np.array([names.index(category) for category in rows["category"]], dtype=float)
        places += 0.22 * (number - (len(series) - 1) / 2)
        errors = [rows["value"] - rows["lower"], rows["upper"] - rows["value"]]
        style = {
            "fmt": marker,
            "ms": 3.5,
            "lw": 1,
            "color": color,
            "mfc": color if number == 0 or marker == "o" else "w",
        }
        ax.errorbar(rows["value"], places, xerr=np.nan_to_num(errors), label=label, **style)
    ax.axvline(0, color=NEUTRAL, linewidth=0.7)
    for place, name in enumerate(names):
        ax.text(1.05, place, PAPER[name], transform=ax.get_yaxis_transform(), ha="center", va="center")
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.tick_params(axis="y", length=0)


def main(options: Options) -> None:
    for name, track, variants in pages("fig5", options.scale):
        tables = table(options.scale, track, variants)
        save_picture(draw(tables), options.at(f"{name}.png"))
        for field in fields(tables):
            found = getattr(tables, field.name)
            write_csv(found, options.at(f"{name}_{field.name}.csv"), float_format="%.6g")
        claims = tables.correlations[tables.correlations["scope"].isin(SCOPES)]
        for found in (claims, tables.contrasts):
            print(found.to_string(index=False, float_format="{:.3f}".format, na_rep="–"), end="\n\n")


if __name__ == "__main__":
    exit_with(lambda: main(tyro.cli(Options, description=__doc__)))
