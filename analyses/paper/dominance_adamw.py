"""Do unlikely tokens dominate AdamW's update as they dominate the gradient? Shares of both, over training.

    python -m analyses.paper.dominance_adamw [--out figures] [--scale cpu]

Drawn from analyses/measure/over_training.py: fresh batches at some checkpoints under the run's own loss. AdamW divides
each entry of the gradient by √v̂ + eps, where v̂ comes from the run's saved second moments and this gradient; shares
are of the raw gradients and in that metric, without momentum and decay. Each interval has two: its share of Σ‖w·g‖²,
the sizes of single tokens' gradients, and of the summed gradient, ⟨G_a, G⟩/‖G‖², in which gradients cancel. Writes
dominance_adamw.png and .csv, and dominance_adamw_contrasts.csv: AdamW's share minus the raw one for the lowest and the
highest interval, and the lowest interval's share minus its share of the tokens, averaged over the checkpoints after
step 0 and paired over seeds, with Holm's correction.

Differs from the paper, which measures only raw gradients and takes SGD steps in its Fig. 1.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import pandas as pd
import tyro
from matplotlib.figure import Figure

from analyses.common.contrasts import tell_seeds
from analyses.common.script import Options, exit_with
from analyses.paper.over_training import (
    LABELS,
    after_start,
    compare_quantities,
    draw_rows,
    name,
    over_seeds,
    read_measured,
    write,
)
from gradscope.plots import NEUTRAL, PAGE_WIDTH, headline, paper_style

SHARES = {
    ("squared_share", "raw"): "Σ‖w·g‖², raw",
    ("squared_share", "adamw"): "Σ‖w·g‖², AdamW",
    ("gradient_share", "raw"): "summed gradient, raw",
    ("gradient_share", "adamw"): "summed gradient, AdamW",
}
"""{(column, metric): total that it is a share of}."""
TOTALS = ("Σ‖w·g‖²", "summed gradient")
WORDS = {"Σ‖w·g‖²": "energy Σ‖w·g‖²", "summed gradient": "summed gradient"}
TOKENS = "tokens"


def table(scale: str) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Return the shares, their contrasts, and by how much AdamW's share exceeds the raw one after step 0.

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
    wide = pooled.pivot(index=["variant", "seed", "of"], columns="quantity", values="value")
    parts = [(wide[f"{total}, AdamW"] - wide[f"{total}, raw"]).rename("value") for total in TOTALS]
    changes = pd.concat([part.reset_index().assign(quantity=t) for part, t in zip(parts, TOTALS, strict=True)])
    claims = contrasts(pooled[pooled["variant"] == pooled["variant"].iloc[0]])
    return drawn, claims, over_seeds(changes, step="after 0")


def contrasts(pooled: pd.DataFrame) -> pd.DataFrame:
    """Return the figure's claims; see the module."""
    squares, squares_adamw, sums, sums_adamw = SHARES.values()
    pairs = []
    for of in (LABELS[0], LABELS[-1]):
        pairs += [(f"{squares_adamw}, {of}", f"{squares}, {of}"), (f"{sums_adamw}, {of}", f"{sums}, {of}")]
    pairs += [(f"{words}, {LABELS[0]}", f"{TOKENS}, {LABELS[0]}") for words in (squares, squares_adamw)]
    return compare_quantities(pooled.assign(quantity=pooled["quantity"] + ", " + pooled["of"]), pairs)


@paper_style()
def draw(shares: pd.DataFrame, changes: pd.DataFrame) -> Figure:
    """Draw the shares after step 0, raw and in AdamW's metric, and beside them what the metric changes."""
    figure, panels = plt.subplots(2, 2, figsize=(PAGE_WIDTH, 4.8), layout="constrained", sharey=True)
    after = shares[shares["step"] == "after 0"]
    for (left, right), total in zip(panels, TOTALS, strict=True):
        draw_rows(left, after[after["quantity"] == f"{total}, AdamW"], LABELS)
        tokens = after[(after["quantity"] == TOKENS) & (after["variant"] == after["variant"].iloc[0])]
        places = [LABELS.index(of) for of in tokens["of"]]
        left.plot(tokens["mean"], places, "|", ms=16, color=NEUTRAL, mew=1.2, label="share of the tokens", zorder=4)
        left.set_title(f"share of the {WORDS[total]}, in AdamW's metric", loc="left")
        draw_rows(right, changes[changes["quantity"] == total], LABELS)
        right.set_title("minus the share of the raw one", loc="left")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=5)
    words = f"Means over {tell_seeds(after['seeds'])} of the mean over the steps after 0; bars: 95 % t "
    return headline(figure, "", f"{words}intervals over the seeds, on the right of paired differences.")


def main(options: Options) -> None:
    drawn, compared, changes = table(options.scale)
    write(draw(drawn, changes), drawn, compared, options.at("dominance_adamw.png"))


if __name__ == "__main__":
    exit_with(lambda: main(tyro.cli(Options, description=__doc__)))
