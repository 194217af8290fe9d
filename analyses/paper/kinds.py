"""Which improbable tokens make the gradient: mere wording, words that steer, or content?

    python -m analyses.paper.kinds [--out figures]

Fig. 1 (d) of the embedded policy, batch by batch and split in three. Words such as " says " or "; hence ", which any
other on their list could replace, are wording, and so is whom the answer names first. "Now " or "Suppose " steer: they
choose between judging and supposing, and reflect how careful the rest is. All else is content: whose claim comes next,
who is supposed to be what, verdicts, when to stop (analyses/recipes/hasty_analysis.py). Drawn from the measurement
`kinds` (analyses/measure/kinds.py): kinds.png and kinds.csv, means over the batches with 95 % t intervals.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import tyro
from matplotlib.figure import Figure

from analyses.common.contrasts import mean_interval
from analyses.common.measurements import read_table
from analyses.common.places import save_picture
from analyses.common.script import Options, exit_with
from analyses.common.tables import PAPER_NORMS
from analyses.recipes.hasty_analysis import KINDS
from gradscope.intervals import interval_labels
from gradscope.plots import NEUTRAL, paper_style

QUANTITIES = ("token_share", "norm_of_all", "gradient_share", "half_cosine")
"""Share of the tokens; norm relative to that of all tokens; ⟨G_a, G⟩/‖G‖²; cosine of two halves of the prompts."""
COLORS = {"all kinds": "#4c566a"} | dict(zip(KINDS, ("#e9a23b", "#b5548a", "#2a9d8f"), strict=True))


def table(options: Options) -> pd.DataFrame:
    """Return a row per kind, interval and quantity: mean, lower, upper over the batches."""
    found = read_table("kinds", "kinds.csv", scale=options.scale)
    whole = found[found["interval"].astype(str) == "all"].set_index("batch")
    own = found[found["interval"].astype(str) != "all"].copy()
    own["token_share"] = own["num_tokens"] / own["batch"].map(whole["num_tokens"])
    own["norm_of_all"] = own["norm"] / own["batch"].map(whole["norm"])
    own = own.drop(columns="interval").rename(columns={"share": "gradient_share", "label": "interval"})
    rows = []
    for (kind, interval), part in own.groupby(["kind", "interval"], sort=False):
        for quantity in QUANTITIES:
            known = part[quantity].dropna()
            mean, lower, upper = mean_interval(known) if len(known) else (np.nan, np.nan, np.nan)
            row = {"kind": kind, "interval": interval, "quantity": quantity, "batches": len(known)}
            rows.append(row | {"mean": mean, "lower": lower, "upper": upper})
    return pd.DataFrame(rows)


@paper_style()
def draw(found: pd.DataFrame) -> Figure:
    """Draw the share of the tokens, and norms as shares of the whole, by interval and kind."""
    figure, axes = plt.subplots(1, 2, figsize=(7.0, 2.6), layout="constrained")
    labels, width = interval_labels(), 0.2
    titles = {
        "token_share": "share of the tokens",
        "norm_of_all": "norm of the summed gradient,\nof that of all tokens",
    }
    for ax, (quantity, title) in zip(axes, titles.items(), strict=True):
        for place, (kind, color) in enumerate(COLORS.items()):
            own = found[(found["kind"] == kind) & (found["quantity"] == quantity)].set_index("interval").loc[labels]
            errors = np.abs(own[["lower", "upper"]].to_numpy().T - own["mean"].to_numpy())
            x = np.arange(len(labels)) + (place - 1.5) * width
            ax.bar(x, own["mean"], width, color=color, label=kind, yerr=errors, error_kw={"elinewidth": 0.8})
        ax.set_xticks(range(len(labels)), labels)
        ax.set(xlabel="π", ylabel=title, ylim=(0, None))
    norms = np.array(PAPER_NORMS)
    look = {"color": "white", "mec": NEUTRAL, "ms": 4, "label": "the paper's"}
    axes[1].plot(np.arange(len(labels)) - 1.5 * width, norms[:-1] / norms[-1], "D", **look)
    figure.legend(*axes[1].get_legend_handles_labels(), loc="outside upper center", ncols=5)
    return figure


def main(options: Options) -> None:
    found = table(options)
    save_picture(draw(found), options.at("kinds.png"), found)
    print(found.to_string(index=False, float_format="{:.3f}".format))


if __name__ == "__main__":
    exit_with(lambda: main(tyro.cli(Options, description=__doc__)))
