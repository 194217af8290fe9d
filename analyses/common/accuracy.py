"""Accuracy by number of people: our runs beside the paper's (Fig. 4, Table 7), and differences between methods.

A run counts as one number per level, the mean of its last three judged checkpoints, as in the paper. The seed is the
unit.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from analyses.common.colors import COLORS
from analyses.common.contrasts import differences, holm, summarize
from analyses.common.experiments import labels, test_of
from analyses.common.read_runs import has_untrained, last_checkpoints, read_untrained
from gradscope.errors import InputError
from gradscope.plots import NEUTRAL, finish

KINDS = ("sampled", "greedy")
UNTRAINED, HERE = "untrained", "here"
PAPER_PEOPLE = ("3", "4", "5", "6", "7", "all")
Paper = Mapping[str, Mapping[str, Sequence[float]]]
"""{model: {variant: accuracies for 3 to 7 people, average, and gain in % if any, as the paper prints them}}."""


def accuracy_by_people(tests: pd.DataFrame, steps: Sequence[int] | None = None) -> pd.DataFrame:
    """Return a row per run and level ("2", …, "all"): variant, label, seed, level, sampled (avg@k) and greedy accuracy.

    steps: see `last_checkpoints`.
    """
    final = last_checkpoints(tests, steps).rename(columns={sampled_name(tests): "sampled", "greedy_accuracy": "greedy"})
    return final[["variant", "label", "seed", "level", *KINDS]]


def sampled_name(tests: pd.DataFrame) -> str:
    """Return the column of sampled accuracy, avg@k. Raises InputError unless there is exactly one."""
    names = [name for name in tests if re.fullmatch(r"avg@\d+", name)]
    if len(names) != 1:
        raise InputError(f"the runs' tests have {', '.join(names) or 'no avg@k'}; judge all of them with one k")
    return names[0]


def average(accuracy: pd.DataFrame) -> pd.DataFrame:
    """Return a row per variant and level: seeds, and mean and 95 % t interval of both accuracies.

    Columns: variant, label, level, seeds, then KIND, KIND_lower, KIND_upper for sampled and greedy.
    """
    keys = ["variant", "label", "level", "seeds"]
    frames = []
    for kind in KINDS:
        names = {"mean": kind, "lower": f"{kind}_lower", "upper": f"{kind}_upper"}
        frames.append(summarize(accuracy, kind, keys[:3]).rename(columns=names).set_index(keys))
    return pd.concat(frames, axis=1).reset_index()


def untrained(scale: str, track: str) -> pd.DataFrame:
    """Return the untrained policy's rows of `average` at the test's temperature; none if it was not measured."""
    if track != "puzzles" or not has_untrained(scale):
        return pd.DataFrame()
    found = read_untrained(scale)
    found = found[found["temperature"] == test_of(scale, track).temperature]
    return found[["level", *KINDS]].assign(variant=UNTRAINED, label=UNTRAINED, seeds=0)


def beside_paper(means: pd.DataFrame, paper: Paper) -> pd.DataFrame:
    """Add a column per model of the paper to the means; NaN at levels that only one of the two has."""
    table = means
    for model, rows in paper.items():
        found = [
            {"variant": variant, "level": level, f"paper {model}": value}
            for variant, values in rows.items()
            for level, value in zip(PAPER_PEOPLE, values[:6], strict=True)
        ]
        table = table.merge(pd.DataFrame(found), on=["variant", "level"], how="outer")
    words = labels() | {UNTRAINED: UNTRAINED}
    places = {variant: place for place, variant in enumerate([UNTRAINED, *labels()])}
    table = table.assign(label=table["variant"].map(words), seeds=table["seeds"].fillna(0).astype(int))
    order = table.assign(place=table["variant"].map(places), people=_people(table["level"]))
    return table.loc[order.sort_values(["place", "people"]).index].reset_index(drop=True)


def lay_out(table: pd.DataFrame, contrasts: pd.DataFrame, paper: Paper) -> pd.DataFrame:
    """Lay out `beside_paper`'s table as in the paper: a row per policy and method, a column per number of people.

    Our entries are sampled accuracies, the mean ± half of the 95 % interval. "average" is over all test puzzles, of
    which there may be fewer for some numbers of people. The last column is the average's gain over the baseline: ours
    at the same seeds (`compare_by_people`'s `relative`), the paper's as printed.
    """
    over_all = contrasts[(contrasts["family"] == "claims") & (contrasts["of"] == "all")].set_index("variant")
    columns = {HERE: "sampled"} | {model: f"paper {model}" for model in paper}
    half = (table["sampled_upper"] - table["sampled_lower"]) / 2
    rows = []
    for policy, column in columns.items():
        ours = policy == HERE
        own = table.assign(value=table[column], half=half if ours else np.nan).dropna(subset="value")
        for (variant, label), cells in own.groupby(["variant", "label"], sort=False):
            row = {"policy": policy, "method": label}
            row |= {"seeds": str(cells["seeds"].max()) if ours and variant != UNTRAINED else ""}
            row |= {cell.level: _plus_minus(cell.value, cell.half) for cell in cells.itertuples()}
            gain = (
                over_all["relative"].mul(100).get(variant, np.nan) if ours else [*paper[policy][variant][6:], np.nan][0]
            )
            rows.append(row | {"gain": "" if np.isnan(gain) else f"{gain:+.1f} %".replace("-", "−")})
    wide = pd.DataFrame(rows)
    return wide[["policy", "method", "seeds", *levels_of(table), "gain"]].fillna("").rename(columns={"all": "average"})


def levels_of(table: pd.DataFrame) -> list[str]:
    """Return a table's levels by number of people, "all" last."""
    levels = table["level"].unique()
    return [levels[place] for place in np.argsort(_people(levels))]


def _people(levels: Sequence[str] | pd.Series | np.ndarray) -> list[float]:
    return [np.inf if level == "all" else float(level) for level in levels]


def _plus_minus(value: float, half: float) -> str:
    words = f"{value:.2f}" if np.isnan(half) else f"{value:.2f}±{half:.2f}"
    return words.replace("0.", ".")


def compare_by_people(accuracy: pd.DataFrame, variants: Sequence[str], baseline: str) -> pd.DataFrame:
    """Return `differences_by_people` in three families of rows, each corrected.

    The figure's claims are the difference in sampled accuracy over all puzzles and its slope per person (a
    least-squares line per seed). The differences at each level, and those in greedy accuracy, are no claims.
    """
    return correct_families(differences_by_people(accuracy, variants, baseline))


def differences_by_people(accuracy: pd.DataFrame, variants: Sequence[str], baseline: str) -> pd.DataFrame:
    """Each variant against the baseline, paired over seeds: a row per variant and question.

    Columns: family, of (the quantity), those of `differences`, and relative (difference over the baseline's mean at
    these seeds).
    """
    pairs = [(variant, baseline) for variant in variants]
    whole = accuracy[accuracy["level"] == "all"]
    questions = [("claims", "all", "sampled", whole), ("claims", "slope per person", "slope", slopes(accuracy))]
    for level, own in accuracy[accuracy["level"] != "all"].groupby("level", sort=False):
        questions.append(("by people", f"{level} people", "sampled", own))
    questions.append(("greedy", "all", "greedy", whole))
    rows = []
    for family, of, kind, table in questions:
        found = differences(table, kind, pairs)
        shares = np.nan if kind == "slope" else found["difference"] / baseline_means(found, table, kind)
        rows.append(found.assign(family=family, of=of, relative=shares))
    return pd.concat(rows, ignore_index=True)


def correct_families(rows: pd.DataFrame) -> pd.DataFrame:
    """Apply Holm's correction within each `family`, which becomes the first column."""
    table = pd.concat([holm(own) for _, own in rows.groupby("family", sort=False)], ignore_index=True)
    return table[["family", "of", *table.columns.drop(["family", "of"])]]


def baseline_means(found: pd.DataFrame, table: pd.DataFrame, value: str) -> list[float]:
    """Return the baseline's mean at the seeds of each row of `differences`; NaN without seeds or if it is 0."""
    wide = table.pivot(index="seed", columns="variant", values=value)
    pairs = zip(found["variant"], found["baseline"], strict=True)
    return [wide.reindex(columns=pair).dropna()[pair[1]].mean() or np.nan for pair in pairs]


def slopes(accuracy: pd.DataFrame) -> pd.DataFrame:
    """Return a row per run: the slope of its sampled accuracy per person."""
    rows = []
    for (variant, seed), own in accuracy[accuracy["level"] != "all"].groupby(["variant", "seed"], sort=False):
        slope = np.polyfit(own["level"].astype(float), own["sampled"], 1)[0] if len(own) > 1 else np.nan
        rows.append({"variant": variant, "seed": seed, "slope": slope})
    return pd.DataFrame(rows, columns=["variant", "seed", "slope"])


def draw_accuracy(ax: Axes, table: pd.DataFrame) -> Axes:
    """Draw each method's accuracy by number of people with its interval; `untrained` is a bar in neutral ink."""
    drawn = table.dropna(subset="sampled")
    levels = levels_of(drawn)
    methods = [variant for variant in drawn["variant"].unique() if variant != UNTRAINED]
    for place, variant in enumerate([UNTRAINED, *methods]):
        own = drawn[drawn["variant"] == variant]
        x = np.array([levels.index(level) for level in own["level"]], dtype=float)
        if variant == UNTRAINED:
            ax.hlines(own["sampled"], x - 0.36, x + 0.36, color=NEUTRAL, linewidth=0.9, linestyle=":")
            continue
        x += (place - (len(methods) + 1) / 2) * 0.72 / max(len(methods), 1)
        errors = [own["sampled"] - own["sampled_lower"], own["sampled_upper"] - own["sampled"]]
        ax.errorbar(x, own["sampled"], errors, fmt="o", markersize=3.5, color=COLORS[variant], elinewidth=1.1)
    ax.set_xticks(range(len(levels)), levels)
    ax.set(xlabel="number of people", ylabel="accuracy", xlim=(-0.5, len(levels) - 0.5))
    within_shares(ax)
    return finish(ax, drawn)


def within_shares(ax: Axes) -> None:
    """Clip the axes to [0, 1], which t intervals of few seeds exceed."""
    low, high = ax.get_ylim()
    ax.set_ylim(max(low, -0.02), min(high, 1.02))


def draw_layout(ax: Axes, layout: pd.DataFrame) -> Axes:
    """Draw `lay_out`'s table as text in the methods' colours, with a rule above each policy."""
    colors = {label: COLORS[variant] for variant, label in labels().items()}
    texts = [name for name in layout if name in ("policy", "method", "seeds")]
    lefts = dict(zip(texts, (0.0, 0.195, 0.375), strict=True))
    numbers = layout.columns.drop(texts)
    lefts |= dict(zip(numbers, np.linspace(0.46, 0.965, len(numbers)), strict=True))
    ax.set(xlim=(0, 1), ylim=(len(layout) + 0.5, -0.8))
    ax.axis("off")
    for name, left in lefts.items():
        ax.text(left, 0, name, va="center", ha="left" if name in texts else "center", weight="bold", fontsize=7.5)
    for place, row in enumerate(layout.to_dict("records"), start=1):
        first = place == 1 or row["policy"] != layout["policy"].iloc[place - 2]
        if first:
            ax.axhline(place - 0.5, color=NEUTRAL, linewidth=0.6)
        for name, left in lefts.items():
            if name == "policy" and not first:
                continue
            color = colors.get(row["method"], NEUTRAL) if name == "method" else "black"
            ax.text(
                left, place, row[name], va="center", ha="left" if name in texts else "center", color=color, fontsize=7.5
            )
    return ax
