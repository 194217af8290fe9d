"""Are the constants of Eq. 3 tight enough to be useful? Products of singular values beside real tokens' gains.

    python -m analyses.paper.layer_constants [--out figures]

Drawn from the measurement `layer_constants` (analyses/measure/layer_constants.py): the policy of a scale in float64 on
responses to two-person puzzles, singular values of every block's Jacobian at eight contexts, *certified* by an exact
SVD or *estimated* by Lanczos. Writes layer_constants.png with its .csv, layer_constants.txt, the reports on Prop. 4.2
and on the constants, and their contents as layer_constants_theory.csv, _spreads.csv, _bounds.csv and _head.csv.

At scale cpu the same files named smollm2_constants… are written for SmolLM2-135M-Instruct, de-quantised from four bits
and continuing the first two words of word problems at T = 1 (`layer_constants_smollm2`).

Not in the paper, which assumes the constants (Assumption 4.1) and does not measure them.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import tyro
from matplotlib.figure import Figure

from analyses.common.experiments import read
from analyses.common.measurements import read_facts, read_table
from analyses.common.places import save_picture
from analyses.common.script import Options, exit_with
from analyses.common.tables import write_csv
from analyses.paper.base_policy import read_theory, tabulate
from analyses.parts.constants import ConstantsReport, report_constants
from gradscope.plots import NEUTRAL, PAGE_WIDTH, finish, headline, paper_style
from gradscope.runs import write_text
from gradscope.theory import TheoryReport

COLORS = {
    "gains of real tokens, anywhere": "#222222",
    "reach over the vocabulary": "#35818e",
    "∏c … ∏d, certified": "#d95f02",
}


MEASUREMENTS = {"layer_constants": "layer_constants", "layer_constants_smollm2": "smollm2_constants"}
"""{measurement: prefix of its files}."""


def table(measurement: str, options: Options) -> tuple[TheoryReport, ConstantsReport]:
    """Test Prop. 4.2 on the measured tokens, and Eq. 3 with the constants."""
    names = ("tokens.parquet", "constants.csv")
    tokens, constants = (read_table(measurement, name, scale=options.scale) for name in names)
    vocab_size = read_facts(measurement, scale=options.scale)["vocab_size"]
    return read_theory(tokens, vocab_size), report_constants(tokens, constants, vocab_size=vocab_size)


def spans(theory: TheoryReport, report: ConstantsReport) -> pd.DataFrame:
    """Return what is drawn, a row per layer and span: layer, span, lower, upper (of gains ‖δ_ℓ‖ / ‖e − π‖)."""
    rows = []
    for layer, part in report.constants.groupby("layer"):
        gains = theory.gains[theory.gains["quantity"] == f"act_grad_norm.{layer}"].iloc[0]
        certified = part[part["product_kind"] == "certified"]
        ends = (
            (gains["min"], gains["max"]),
            (part["reach_min"].min(), part["reach_max"].max()),
            (certified["product_c"].min(), certified["product_d"].max()),
        )
        rows += [{"layer": layer, "span": n, "lower": a, "upper": b} for n, (a, b) in zip(COLORS, ends, strict=True)]
        estimated = part.loc[part["product_kind"] == "estimated", "product_d"]
        rows.append({"layer": layer, "span": "∏d, estimated", "lower": np.nan, "upper": estimated.max()})
    return pd.DataFrame(rows)


@paper_style()
def draw(theory: TheoryReport, report: ConstantsReport) -> Figure:
    """Draw real tokens' gains and their exact range by layer; below, how far the certified bounds are from them."""
    drawn = spans(theory, report)
    layers = sorted(drawn["layer"].unique())
    height, thick = 4.6, 5 if len(layers) < 10 else 2.5
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(PAGE_WIDTH, height), layout="constrained", sharex=True)
    *shown, certified = COLORS
    parts = {name: drawn[drawn["span"] == name].set_index("layer").loc[layers] for name in COLORS}
    for number, name in enumerate(shown):
        x = np.array(layers) + 0.2 * (number - 0.5)
        top.vlines(x, parts[name]["lower"], parts[name]["upper"], color=COLORS[name], lw=thick, label=name)
    top.set(yscale="log", ylabel="gain ‖δℓ‖ / ‖e − π‖\nof token gradients")
    real, bound = parts[shown[0]], parts[certified]
    above = np.log10(bound["upper"] / real["upper"])
    below = np.log10((bound["lower"] / real["lower"]).where(bound["lower"] > 0))
    floor = 1.15 * min(np.nanmin([0.0, *below]), -1)
    bottom.bar(layers, above, 0.6, color=COLORS[certified], label=certified)
    bottom.bar(layers, below.fillna(floor), 0.6, color=COLORS[certified])
    zero = below.isna().to_numpy()
    foot = np.full(zero.sum(), 1.08 * floor)
    bottom.plot(np.array(layers)[zero], foot, "v", color=COLORS[certified], ms=5, clip_on=False)
    estimated = drawn[drawn["span"] == "∏d, estimated"].set_index("layer").reindex(layers)["upper"]
    if estimated.notna().any():
        looks = {"s": 90, "color": "black", "zorder": 3, "label": "∏d, estimated"}
        bottom.scatter(layers, np.log10(estimated / real["upper"]), marker="_", **looks)
    bottom.axhline(0, color=NEUTRAL, lw=0.6)
    bottom.set_ylabel("orders of magnitude beyond\nreal tokens' gains")
    bottom.set_xticks(layers[:: 1 + len(layers) // 16])
    bottom.set_xlabel("layer ℓ (0: input of the first block)")
    handles = [*zip(*top.get_legend_handles_labels(), strict=True)]
    handles += [*zip(*bottom.get_legend_handles_labels(), strict=True)]
    figure.legend(*zip(*handles, strict=True), loc="outside upper center", ncols=4)
    finish(top, drawn)
    return headline(figure, "", "▾: ∏c is 0, so that nothing is bounded from below." if zero.any() else "")


def main(options: Options) -> None:
    for measurement, name in MEASUREMENTS.items():
        if options.scale not in read()["measurements"][measurement]["scales"]:
            continue
        theory, report = table(measurement, options)
        words = f"{theory}\n{report}\n"
        print(words)
        save_picture(draw(theory, report), options.at(f"{name}.png"))
        write_text(options.at(f"{name}.txt"), words)
        tables = {"theory": tabulate(theory), "spreads": report.spreads, "bounds": report.bounds}
        tables["head"] = report.constants[report.constants["module"] == "head"][["context", "c", "d"]]
        for part, numbers in tables.items():
            write_csv(numbers, options.at(f"{name}_{part}.csv"))


if __name__ == "__main__":
    exit_with(lambda: main(tyro.cli(Options, description=__doc__)))
