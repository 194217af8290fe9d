"""How the intervals' shares of the summed gradient change with the number of puzzles in a batch.

    python -m analyses.paper.batch_sizes [--out figures] [--scale cpu]

In a larger batch less of ‖G‖² is noise, which may be spread over the intervals differently from the signal. Drawn from
the measurement `batch_sizes` (analyses/measure/batch_sizes.py): batch_sizes.png and batch_sizes.csv, means over
disjoint batches with 95 % t intervals. All sizes are dealt from the same responses.

The paper has no such figure.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import pandas as pd
import tyro
from matplotlib.figure import Figure

from analyses.common.contrasts import mean_interval
from analyses.common.measurements import read_facts, read_table
from analyses.common.places import save_picture
from analyses.common.script import Options, exit_with
from gradscope.intervals import interval_labels
from gradscope.plots import headline, interval_colors, paper_style

QUANTITIES = {
    "gradient_share": "share of the summed gradient\n⟨G_a, G⟩/‖G‖²",
    "norm_of_all": "norm of the summed gradient,\nof that of all tokens",
}


def table(options: Options) -> pd.DataFrame:
    """Return a row per size, interval and quantity: batches, and mean, bounds and standard deviation over them."""
    found = read_table("batch_sizes", "batch_sizes.csv", scale=options.scale)
    keys = ["size", "batch"]
    whole = found[found["label"] == "all"].set_index(keys)["norm"].rename("whole")
    found = found[found["label"] != "all"].rename(columns={"share": "gradient_share"}).join(whole, on=keys)
    found["norm_of_all"] = found["norm"] / found["whole"]
    rows = []
    for (size, interval), own in found.groupby(["size", "label"], sort=False):
        for quantity in QUANTITIES:
            mean, lower, upper = mean_interval(own[quantity])
            row = {"size": size, "interval": interval, "quantity": quantity, "batches": len(own)}
            rows.append(row | {"mean": mean, "lower": lower, "upper": upper, "sd": own[quantity].std()})
    return pd.DataFrame(rows)


@paper_style()
def draw(found: pd.DataFrame, questions: int) -> Figure:
    """Draw a panel per quantity and a line per interval."""
    figure, axes = plt.subplots(1, 2, figsize=(7.0, 2.6), layout="constrained")
    sizes = sorted(found["size"].unique())
    for ax, (quantity, title) in zip(axes, QUANTITIES.items(), strict=True):
        for place, (label, color) in enumerate(zip(interval_labels(), interval_colors(), strict=True)):
            own = found[(found["quantity"] == quantity) & (found["interval"] == label)].sort_values("size")
            errors = [own["mean"] - own["lower"], own["upper"] - own["mean"]]
            beside = own["size"] * 1.05 ** (place - 1.5)
            ax.errorbar(beside, own["mean"], errors, fmt="o-", color=color, ms=3.5, lw=1, label=label)
        ax.axhline(0, color="0.8", lw=0.8, zorder=0)
        ax.set_xscale("log", base=2)
        ax.set_xticks(sizes, [f"{size}" for size in sizes])
        ax.set(xlabel="puzzles in the batch, × 8 responses", ylabel=title)
    figure.legend(*axes[0].get_legend_handles_labels(), title="π", loc="outside right center")
    counts = ", ".join(f"{count}" for count in found.drop_duplicates("size").sort_values("size")["batches"])
    headline(figure, "", f"means over {counts} batches of the same {questions} puzzles, 95 % t intervals")
    return figure


def main(options: Options) -> None:
    found = table(options)
    questions = read_facts("batch_sizes", scale=options.scale)["questions"]
    save_picture(draw(found, questions), options.at("batch_sizes.png"), found)
    print(found.to_string(index=False, float_format="{:.3f}".format))


if __name__ == "__main__":
    exit_with(lambda: main(tyro.cli(Options, description=__doc__)))
