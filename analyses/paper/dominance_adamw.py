"""Do unlikely tokens dominate AdamW's update as they dominate the gradient? Shares of both, over training.

    python -m analyses.paper.dominance_adamw [--out figures] [--scale cpu]

Drawn from analyses/measure/over_training.py: fresh batches at some checkpoints under the run's own loss. AdamW divides
each entry of the gradient by √v̂ + eps, where v̂ comes from the run's saved second moments and this gradient; shares
are of the raw gradients and in that metric, without momentum and decay. Each interval has two: its share of Σ‖w·g‖²,
the sizes of single tokens' gradients, and of the summed gradient, ⟨G_a, G⟩/‖G‖², in which gradients cancel. A row of
panels per method. Writes dominance_adamw.png and .csv, and dominance_adamw_contrasts.csv: AdamW's share minus the raw
one for the lowest and the highest interval, and the lowest interval's share minus its share of the tokens, averaged
over the checkpoints after step 0 and paired over seeds, with Holm's correction.

Differs from the paper, which measures only raw gradients and takes SGD steps in its Fig. 1.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import pandas as pd
import tyro
from matplotlib.figure import Figure

from analyses.common.contrasts import tell_seeds
from analyses.common.experiments import labels
from analyses.common.script import Options, exit_with
from analyses.paper.over_training import (
    INTERVAL_COLORS,
    LABELS,
    after_start,
    compare_quantities,
    draw_bars,
    name,
    over_seeds,
    read_measured,
    write,
)
from gradscope.plots import paper_style

SHARES = {
    ("squared_share", "raw"): "Σ‖w·g‖², raw",
    ("squared_share", "adamw"): "Σ‖w·g‖², AdamW",
    ("gradient_share", "raw"): "summed gradient, raw",
    ("gradient_share", "adamw"): "summed gradient, AdamW",
}
"""{(column, metric): total that it is a share of}."""
TOKENS = "tokens"


def table(scale: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the shares and their contrasts.

    Shares have a row per share (`quantity`), variant, step ("after 0": mean over these) and interval (`of`), with
    seeds, mean, lower and upper over seeds; the contrasts are of the first measured variant.
    """
    gradients, tokens = read_measured("gradients", scale), read_measured("tokens", scale)
    parts = [tokens.assign(quantity=TOKENS, value=tokens["token_share"])]
    for (column, metric), words in SHARES.items():
        rows = gradients[(gradients["metric"] == metric) & (gradients["interval"] != "all")]
        parts.append(rows.assign(quantity=words, value=rows[column]))
    values = pd.concat(parts)[["quantity", "variant", "seed", "step", "interval", "value"]]
    values["of"] = values.pop("interval").map(name)
    pooled = after_start(values)
    drawn = pd.concat([over_seeds(values, step=values["step"]), over_seeds(pooled, step="after 0")], ignore_index=True)
    return drawn, contrasts(pooled[pooled["variant"] == pooled["variant"].iloc[0]])


def contrasts(pooled: pd.DataFrame) -> pd.DataFrame:
    """Return the figure's claims; see the module."""
    squares, squares_adamw, sums, sums_adamw = SHARES.values()
    pairs = []
    for of in (LABELS[0], LABELS[-1]):
        pairs += [(f"{squares_adamw}, {of}", f"{squares}, {of}"), (f"{sums_adamw}, {of}", f"{sums}, {of}")]
    pairs += [(f"{words}, {LABELS[0]}", f"{TOKENS}, {LABELS[0]}") for words in (squares, squares_adamw)]
    return compare_quantities(pooled.assign(quantity=pooled["quantity"] + ", " + pooled["of"]), pairs)


@paper_style()
def draw(drawn: pd.DataFrame) -> Figure:
    """Draw a row per method and a panel per share; dotted lines are shares of the tokens."""
    variants = list(drawn["variant"].unique())
    size = (7.3, 0.7 + 1.9 * len(variants))
    figure, panels = plt.subplots(len(variants), 4, figsize=size, layout="constrained", squeeze=False, sharey=True)
    for row, variant in zip(panels, variants, strict=True):
        own = drawn[(drawn["variant"] == variant) & (drawn["step"] != "after 0")]
        own = own.assign(step=own["step"].astype(int)).sort_values("step")
        for ax, words in zip(row, SHARES.values(), strict=True):
            for place, label in enumerate(LABELS):
                of_tokens, rows = (own[(own["quantity"] == q) & (own["of"] == label)] for q in (TOKENS, words))
                color, steps = INTERVAL_COLORS[label], rows["step"] + 1.5 * (place - 1.5)
                ax.plot(of_tokens["step"], of_tokens["mean"], color=color, linestyle=":", linewidth=1.0)
                ax.plot(steps, rows["mean"], color=color, label=label, marker="o", ms=2)
                draw_bars(ax, steps, rows, color=color)
        row[0].set_ylabel(f"{labels()[variant]}, {tell_seeds(own['seeds'])}\nshare")
    for ax, words in zip(panels[0], SHARES.values(), strict=True):
        ax.set_title(words.replace(", ", "\n"))
    for ax in panels[-1]:
        ax.set_xlabel("step")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    figure.supxlabel(
        "Means over seeds; bars: 95 % t intervals, from three seeds on; dotted: shares of the tokens", fontsize=7
    )
    return figure


def main(options: Options) -> None:
    drawn, compared = table(options.scale)
    write(draw(drawn), drawn, compared, options.at("dominance_adamw.png"))


if __name__ == "__main__":
    exit_with(lambda: main(tyro.cli(Options, description=__doc__)))
