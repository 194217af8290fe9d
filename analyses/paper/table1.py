"""Table 1: math, with GRPO, Reweight, Lopti and both: three benchmarks greedily, two by 16 samples.

    python -m analyses.paper.table1 [--out figures] [--scale cpu]

Writes table1.csv (a row per policy, method and column, in percent, with 95 % intervals over seeds), table1.md (laid out
as in the paper, its rows below ours) and table1_contrasts.csv. The table's claims, with Holm's correction, are about
the average: each method against GRPO, and both together against each alone ("no further gains"). The same contrasts of
plain sampled accuracy over all questions are a family of their own, since three of the six columns are near their
ceiling; and so are the differences in each column, which are no claims.

Differs from the paper at scale cpu: the benchmarks are the levels of one test, sums of 2 to 6 steps, of which the
harder ones are sampled and the easier ones are near their ceiling before training; there is one set of training
questions instead of two (DSR-Uniform, ORZ), and there are several seeds. At scale paper they are the paper's. At both
scales a run's number is the average over its last three checkpoints, as the paper states for its puzzles but not for
its math.
"""

from __future__ import annotations

import pandas as pd
import tyro

from analyses.common.contrasts import compare, holm, summarize
from analyses.common.experiments import labels
from analyses.common.math_tracks import TRAINED_ON, read_before
from analyses.common.read_runs import last_checkpoints, pages, read_tests
from analyses.common.script import Options, exit_with
from analyses.common.tables import write_table

GREEDY, AVERAGED, PASSED = "greedy_accuracy", "avg@16", "pass@16"
AVERAGE = "average"
UNTRAINED = "untrained"
Column = tuple[str, str, str]
"""Title, level (or benchmark) of the test, and score."""
SUMS: tuple[Column, ...] = (
    ("2 steps, greedy", "2", GREEDY),
    ("3 steps, greedy", "3", GREEDY),
    ("4 steps, greedy", "4", GREEDY),
    ("5 steps, avg@16", "5", AVERAGED),
    ("6 steps, pass@16", "6", PASSED),
    ("6 steps, avg@16", "6", AVERAGED),
)
PROBLEMS: tuple[Column, ...] = (
    ("OlympiadBench, greedy", "olympiad_bench", GREEDY),
    ("Minerva, greedy", "minerva", GREEDY),
    ("MATH-500, greedy", "math500", GREEDY),
    ("AMC, avg@16", "amc", AVERAGED),
    ("AIME24, pass@16", "aime24", PASSED),
    ("AIME24, avg@16", "aime24", AVERAGED),
)
COLUMNS = {"math": SUMS, "math-dsr": PROBLEMS, "math-orz": PROBLEMS}
PLAIN = "all questions, avg@16"
PAPER = {
    ("Qwen2.5-7B", UNTRAINED): (27.64, 18.38, 63.00, 22.21, 30.00, 5.00, 27.71),
    ("DSR-Uniform", "grpo"): (36.50, 29.66, 74.67, 47.72, 28.89, 16.46, 38.98),
    ("DSR-Uniform", "reweight"): (37.00, 29.66, 75.47, 48.32, 35.56, 14.03, 40.01),
    ("DSR-Uniform", "lopti"): (36.60, 30.27, 76.53, 47.69, 32.22, 14.24, 39.59),
    ("ORZ", "grpo"): (38.23, 27.69, 78.33, 49.57, 32.22, 12.92, 39.83),
    ("ORZ", "reweight"): (40.81, 29.04, 77.80, 49.07, 33.33, 16.46, 41.09),
    ("ORZ", "lopti"): (38.63, 29.78, 78.53, 47.29, 34.44, 15.28, 40.66),
}
"""The paper's Table 1, in percent: the six columns of PROBLEMS and their average."""


def scores(tests: pd.DataFrame, columns: tuple[Column, ...]) -> pd.DataFrame:
    """Return a row per run and column, and one for the mean of the columns, in percent.

    tests: from `read_tests`, or a row per level alone. Columns: variant, seed, column, value.
    """
    final, rows = last_checkpoints(tests), []
    for (variant, seed), own in final.groupby(["variant", "seed"], sort=False):
        own = own.set_index("level")
        values = {title: 100 * own.loc[level, score] for title, level, score in columns}
        values[AVERAGE] = sum(values.values()) / len(values)
        rows += [{"variant": variant, "seed": seed, "column": title, "value": v} for title, v in values.items()]
    return pd.DataFrame(rows)


def table(scale: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return means over seeds and the contrasts, for all of the scale's tracks.

    The first has the columns data, variant, label, column, seeds, mean, lower, upper, in percent; seeds is 0 for the
    untrained policy. The second has data, family, column, and those of `compare`, in points.
    """
    means, contrasts = [], []
    for _, track, variants in pages("table1", scale):
        data, columns = TRAINED_ON[track], COLUMNS[track]
        before = read_before(scale, track)
        if before is not None:
            untrained = scores(before.assign(track=track, variant=UNTRAINED, label=UNTRAINED, seed=0), columns)
            means.append(summarize(untrained, "value", ["variant", "column"]).assign(data=data, seeds=0))
        tests = read_tests(variants, scale=scale, track=track)
        runs = scores(tests, columns)
        means.append(summarize(runs, "value", ["variant", "column"]).assign(data=data))
        plain = scores(tests, ((PLAIN, "all", AVERAGED),)) if "all" in set(tests["level"]) else None
        contrasts.append(contrast(runs, plain).assign(data=data))
    table, claims = pd.concat(means, ignore_index=True), pd.concat(contrasts, ignore_index=True)
    table["label"] = table["variant"].map(labels() | {UNTRAINED: UNTRAINED})
    names = ["data", "variant", "label", "column", "seeds", "mean", "lower", "upper"]
    return table[names], claims[["data", *claims.columns.drop("data")]]


def contrast(runs: pd.DataFrame, plain: pd.DataFrame | None) -> pd.DataFrame:
    """Contrast the average (the claims), plain accuracy, and each column, with Holm's correction within each family.

    plain: `scores` of PLAIN; None if questions of different benchmarks have no common score.
    """
    methods = [name for name in ("reweight", "lopti", "both") if name in set(runs["variant"])]
    against = [(name, "grpo") for name in methods]
    together = [("both", name) for name in methods if "both" in methods and name != "both"]
    average = compare(runs[runs["column"] == AVERAGE], "value", against + together)
    columns = [title for title in runs["column"].unique() if title != AVERAGE]
    parts = [compare(runs[runs["column"] == title], "value", against).assign(column=title) for title in columns]
    rest = holm(pd.concat(parts, ignore_index=True)).assign(family="by column")
    families = [average.assign(column=AVERAGE, family="claims")]
    if plain is not None:
        plain = plain[plain["column"] == PLAIN]
        families.append(compare(plain, "value", against + together).assign(column=PLAIN, family="plain accuracy"))
    table = pd.concat([*families, rest], ignore_index=True)
    return table[["family", "column", *table.columns.drop(["family", "column"])]]


def lay_out(means: pd.DataFrame) -> pd.DataFrame:
    """Lay out the table as in the paper: a row per data and method, columns and their average; the paper's rows below.

    Our entries are the mean ± half of the 95 % interval.
    """
    rows = []
    for (data, label), own in means.groupby(["data", "label"], sort=False):
        seeds = own["seeds"].iloc[0]
        cells = [_cell(row.mean, row.upper - row.mean) for row in own.itertuples()]
        rows.append(["here", data, label, str(seeds) if seeds else "", *cells])
    for (data, variant), values in PAPER.items():
        label = labels().get(variant, variant)
        rows.append(["paper", data, label, "", *(f"{value:.2f}" for value in values)])
    ours = means.loc[means["data"] == means["data"].iloc[0], "column"].unique()
    theirs = [*(title for title, _, _ in PROBLEMS), AVERAGE]
    titles = [one if one == other else f"{one} (paper: {other})" for one, other in zip(ours, theirs, strict=True)]
    return pd.DataFrame(rows, columns=["source", "trained on", "method", "seeds", *titles])


def _cell(mean: float, half: float) -> str:
    return f"{mean:.1f}" if pd.isna(half) else f"{mean:.1f} ± {half:.1f}"


def main(options: Options) -> None:
    means, contrasts = table(options.scale)
    shown = lay_out(means)
    write_table(means, options.at("table1.md"), shown=shown)
    write_table(contrasts, options.at("table1_contrasts.md"))
    print(shown.to_string(index=False), contrasts.to_string(index=False, float_format="{:.3f}".format), sep="\n\n")


if __name__ == "__main__":
    exit_with(lambda: main(tyro.cli(Options, description=__doc__)))
