"""Fig. 1 of the paper, all six panels, on a policy in training: where tokens are, and what one step does to them.

    python -m analyses.paper.fig1 [--out figures]

Drawn from the measurement `updates` (analyses/measure/updates.py): steps on all tokens, on those of [0, ¼) alone and on
those of [¾, 1] alone, from the same policy, on each of four batches of 64 × 8 responses. "(e) closely matches (c) while
(f) does not" becomes a number: the correlation of changes in log odds, log π − log(1−π), over the tokens outside the
updated interval, with a t interval over the batches, since all prompts of a batch share one update. fig1_similarity.csv
also has it under the run's own AdamW, momentum included, and how far (e) and (f) are apart, with p of a paired t test.

Differs from the paper: the policy (0.8 M parameters, after 40 GRPO steps), its puzzles, four batches instead of one;
violins are split by the sign of the advantage, and the top 1 % of |Δπ| is dropped per interval, not overall. A step
uses the whole batch, where the run takes two on 64 responses each. The paper's shares in (a) and norms in (d, as ratios
to that of all tokens) are read off its figure.
"""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import tyro
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy import stats

from analyses.common.contrasts import mean_interval
from analyses.common.measurements import read_table
from analyses.common.places import save_picture
from analyses.common.script import Options, exit_with
from analyses.common.tables import PAPER_NORMS, write_csv
from gradscope.plots import (
    PAGE_WIDTH,
    drawn_numbers,
    finish,
    headline,
    paper_style,
    plot_advantages,
    plot_interval_gradient_norms,
    plot_movement,
    plot_token_shares,
)

PANELS = {"all": "(c) all tokens updated", "only-0": "(e) only [0, ¼)", "only-3": "(f) only [¾, 1]"}
WORDS = (
    "“Like (c)”: correlation with (c) of the changes in log odds of the tokens outside the updated interval, with a "
    "95 % interval over four batches. In each interval the 1 % of tokens that moved most is not drawn."
)
APART = "only-0 − only-3"
"""How far (e) and (f) are apart, in the table of similarities."""
PAPER_SHARES = (19.22, 10.15, 10.09, 60.54)
"""Fig. 1 (a) of the paper: % of the tokens in each interval."""


def table(options: Options) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Return movements of all batches' tokens under SGD, norms beside the paper's, similarities, and movements."""
    names = ("tokens.parquet", "gradients.csv", "similarity.csv", "movements.csv")
    tokens, gradients, similar, movements = (read_table("updates", name, scale=options.scale) for name in names)
    return tokens, gradients.assign(paper=PAPER_NORMS), over_batches(similar, ["optimizer"]), movements


def over_batches(similar: pd.DataFrame, keys: Sequence[str]) -> pd.DataFrame:
    """Return each batch's correlations, then a row "all" for each update, and APART: means with 95 % t intervals over
    the batches, p (a t test of APART against 0), and how many batches there are.

    keys: columns within whose values batches are compared. Rows "all" of tables kept earlier, which resampled prompts,
    are left out.
    """
    similar, parts = similar[similar["batch"].astype(str) != "all"], []
    for key, own in similar.groupby(list(keys), sort=False):
        wide = own.pivot(index="batch", columns="update", values="correlation")[list(PANELS)[1:]]
        wide[APART] = wide["only-0"] - wide["only-3"]
        for name, values in wide.items():
            found = dict(zip(("correlation", "lower", "upper"), mean_interval(values), strict=True))
            p = stats.ttest_1samp(values, 0).pvalue if name == APART else np.nan
            row = dict(zip(keys, key, strict=True)) | {"update": name, "batch": "all", "batches": len(values)}
            parts.append(row | found | {"p": p})
    names = ["update", "batch", *keys, "num_tokens", "correlation"]
    return pd.concat([similar[names], pd.DataFrame(parts)], ignore_index=True)


@paper_style()
def draw(tokens: pd.DataFrame, norms: pd.DataFrame, similar: pd.DataFrame) -> Figure:
    """Draw the six panels in the paper's arrangement."""
    figure, axes = plt.subplots(2, 3, figsize=(PAGE_WIDTH, 5.0), layout="constrained")
    axes = dict(zip("abcdef", axes.flat, strict=True))
    plot_token_shares(tokens, ax=axes["a"]).set_title("(a) token shares", loc="left")
    add_paper_shares(axes["a"])
    plot_advantages(tokens, ax=axes["b"]).set_title("(b) advantages", loc="left")
    plot_interval_gradient_norms(norms, ax=axes["d"]).set_title("(d) gradient norms", loc="left")
    of_all = similar[(similar["optimizer"] == "sgd") & (similar["batch"] == "all")].set_index("update")
    for panel, (name, title) in zip("cef", PANELS.items(), strict=True):
        plot_movement(tokens, name, ax=axes[panel])
        if name in of_all.index:
            found = of_all.loc[name]
            title += f"\nlike (c): {found.correlation:.2f} [{found.lower:.2f}, {found.upper:.2f}]"
        axes[panel].set_title(title, loc="left")
    bottoms, tops = zip(*(axes[panel].get_ylim() for panel in "cef"), strict=True)
    for panel in "cef":
        axes[panel].set_ylim(min(bottoms), max(tops))
        axes[panel].set(xlabel="$π_{old}$; beneath: mean |Δπ|", ylabel="Δπ of a token")
    for panel in "ef":  # as in (c)
        axes[panel].get_legend().remove()
    return headline(figure, "", WORDS)


def add_paper_shares(ax: Axes) -> Axes:
    """Mark the paper's shares on the bars."""
    places = 0.5 + np.arange(len(PAPER_SHARES))
    ax.plot(places + 0.3, PAPER_SHARES, "D", ms=4, mfc="white", mec="black", mew=0.8, label="paper")
    ax.legend(loc="lower left", bbox_to_anchor=(0.0, 0.45), borderpad=0, handletextpad=0.2)
    drawn = drawn_numbers(ax)
    paper = pd.Series(PAPER_SHARES, index=drawn.index[: len(PAPER_SHARES)])
    drawn.insert(drawn.columns.get_loc("share_percent") + 1, "paper_percent", paper)
    return finish(ax, drawn)


def main(options: Options) -> None:
    tokens, norms, similar, movements = table(options)
    save_picture(draw(tokens, norms, similar), options.at("fig1.png"))
    write_csv(similar, options.at("fig1_similarity.csv"))
    write_csv(movements, options.at("fig1_movements.csv"), float_format="%.4g")
    write_csv(norms, options.at("fig1_gradients.csv"))
    print(similar.to_string(index=False, float_format="{:.3f}".format))
    print(norms.to_string(index=False, float_format="{:.3g}".format))


if __name__ == "__main__":
    exit_with(lambda: main(tyro.cli(Options, description=__doc__)))
