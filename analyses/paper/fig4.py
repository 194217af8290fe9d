"""Fig. 4: reward in training and accuracy by number of people, with GRPO, Reweight, Lopti and both.

    python -m analyses.paper.fig4 [--out figures] [--scale cpu]

Writes fig4.png with the curves as its CSV, fig4_accuracy.csv and .md (sampled and greedy, beside the paper's) and
fig4_contrasts.csv (each method against GRPO, with Holm's correction over the figure's six claims). The contrasts named
before any run was made, in families of their own, are in analyses/paper/controls.py.

Differs from the paper: the policies and their puzzles; several seeds, with intervals; α = .3 as in its text (the
released code has .2 for Reweight alone). The paper does not say whether its answers are sampled or greedy; here they
are sampled at the training temperature, and the CSVs have greedy ones too.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import pandas as pd
import tyro
from matplotlib.figure import Figure

from analyses.common.accuracy import (
    Paper,
    accuracy_by_people,
    average,
    beside_paper,
    compare_by_people,
    draw_accuracy,
    draw_layout,
    lay_out,
    untrained,
)
from analyses.common.curves import BAND, draw_curves, smooth
from analyses.common.places import save_picture
from analyses.common.read_runs import pages, read_metrics, read_tests
from analyses.common.script import Options, exit_with
from analyses.common.tables import write_table
from gradscope.plots import headline, paper_style

PAPER: Paper = {
    "Qwen2.5-3B-Instruct": {
        "untrained": (0.09, 0.10, 0.03, 0.05, 0.02, 0.06),
        "grpo": (0.60, 0.45, 0.33, 0.34, 0.23, 0.39),
        "reweight": (0.67, 0.62, 0.53, 0.44, 0.37, 0.53, 35.9),
        "lopti": (0.74, 0.67, 0.56, 0.42, 0.30, 0.54, 38.5),
        "both": (0.72, 0.66, 0.55, 0.52, 0.40, 0.57, 46.2),
    },
    "Qwen2.5-7B-Instruct-1M": {
        "untrained": (0.22, 0.15, 0.08, 0.10, 0.02, 0.11),
        "grpo": (0.91, 0.91, 0.77, 0.65, 0.61, 0.77),
        "reweight": (0.97, 0.98, 0.89, 0.83, 0.80, 0.89, 15.6),
        "lopti": (0.95, 0.94, 0.84, 0.80, 0.76, 0.86, 9.1),
        "both": (0.95, 0.94, 0.91, 0.87, 0.87, 0.91, 18.2),
    },
}
"""The paper's Fig. 4; Lopti's printed gain on 7B does not follow from its averages (.86 over .77 would be 11.7 %)."""


def table(scale: str, track: str, variants: list[str]) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Return the curves, accuracies beside the paper's (and the untrained policy's, if measured), and contrasts."""
    curves = smooth(read_metrics(variants, scale=scale, track=track), "reward_mean")
    accuracy = accuracy_by_people(read_tests(variants, scale=scale, track=track))
    means = pd.concat([untrained(scale, track), average(accuracy)], ignore_index=True)
    contrasts = compare_by_people(accuracy, [variant for variant in variants if variant != "grpo"], "grpo")
    return curves, beside_paper(means, PAPER), contrasts


@paper_style()
def draw(curves: pd.DataFrame, accuracies: pd.DataFrame, shown: pd.DataFrame) -> Figure:
    """Draw reward against the step, accuracy by number of people, and below both the table with the paper's rows."""
    figure, panels = plt.subplot_mosaic(
        [["reward", "people"], ["table", "table"]], figsize=(7.3, 5.6), layout="constrained", height_ratios=[1, 1.15]
    )
    draw_curves(panels["reward"], curves, ylabel="reward in training").legend(loc="lower right")
    panels["reward"].set_title("(a) Reward", loc="left")
    draw_accuracy(panels["people"], accuracies)
    panels["people"].set_title("(b) Accuracy, sampled; mean and 95 % interval", loc="left")
    draw_layout(panels["table"], shown)
    panels["table"].set_title("(c) The same beside the paper's (Fig. 4); ± half of the 95 % interval", loc="left")
    said = f"(a): {BAND}\n(b): dotted: untrained. (c): gain over GRPO's average; here at the seeds that both have"
    headline(figure, "", said)
    return figure


def main(options: Options) -> None:
    for name, track, variants in pages("fig4", options.scale):
        curves, accuracies, contrasts = table(options.scale, track, variants)
        shown = lay_out(accuracies, contrasts, PAPER)
        save_picture(draw(curves, accuracies, shown), options.at(f"{name}.png"), curves)
        write_table(accuracies, options.at(f"{name}_accuracy.md"), shown=shown)
        write_table(contrasts, options.at(f"{name}_contrasts.md"))
        print(shown.to_string(index=False), contrasts.to_string(index=False, float_format="{:.3f}".format), sep="\n\n")


if __name__ == "__main__":
    exit_with(lambda: main(tyro.cli(Options, description=__doc__)))
