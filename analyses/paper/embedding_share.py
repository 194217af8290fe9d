"""How much of a token's squared gradient norm is that of the table which embedding and head share.

    python -m analyses.paper.embedding_share [--out figures]

Drawn from the measurement `embedding_share` (analyses/measure/embedding_share.py), of three policies whose table holds
3 to 63 % of the parameters; SmolLM2's and Gemma's weights are de-quantised from four bits. Bounds are over prompts.

The paper has no such figure.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import tyro
from matplotlib.figure import Figure

from analyses.common.measurements import read_table
from analyses.common.script import Options, exit_with
from analyses.measure.embedding_share import TABLE
from gradscope.gradients import PARAMETERS
from gradscope.intervals import interval_labels
from gradscope.plots import interval_colors, paper_style, save_figure
from gradscope.resampling import SHARE, bootstrap


def table(options: Options) -> pd.DataFrame:
    """A row per policy and interval, or all: the share of Σ‖g‖² of all tokens, as the sample stands for them."""
    tokens, policies = (
        read_table("embedding_share", f"{name}.csv", scale=options.scale) for name in ("tokens", "policies")
    )
    sizes = policies.set_index("policy")
    rows = []
    for policy, own in tokens.groupby("policy", sort=False):
        parts = [*((label, own[own["interval"] == i]) for i, label in enumerate(interval_labels())), ("all", own)]
        for label, part in parts:
            names, clusters = np.unique(part["group"], return_inverse=True)
            squares = part[[TABLE, PARAMETERS]].to_numpy() ** 2 * part[["weight"]].to_numpy()
            above, below = (np.bincount(clusters, column, len(names)) for column in squares.T)
            found = bootstrap(
                lambda w, a=above, b=below: (w @ a / (w @ b))[:, None],
                len(names),
                scale=SHARE,
                measured=np.array([len(part)]),
            )[:, 0]
            row = {"policy": policy, "interval": label, "tokens": len(part)}
            row |= dict(zip(("share", "lower", "upper"), found, strict=True))
            rows.append(row | {"of_parameters": sizes["table"][policy] / sizes["parameters"][policy]})
    return pd.DataFrame(rows)


@paper_style()
def draw(found: pd.DataFrame) -> Figure:
    """A group of bars per policy; a line is the table's share of the parameters."""
    figure, ax = plt.subplots(figsize=(6.4, 2.8), layout="constrained")
    policies, labels = list(dict.fromkeys(found["policy"])), [*interval_labels(), "all"]
    colors = [*interval_colors(), "0.35"]
    for place, (label, color) in enumerate(zip(labels, colors, strict=True)):
        own = found[found["interval"] == label].set_index("policy").loc[policies]
        errors = np.abs(own[["lower", "upper"]].to_numpy().T - own["share"].to_numpy())
        ax.bar(np.arange(len(policies)) + 0.16 * place, own["share"], 0.16, yerr=errors, color=color, label=label)
    sizes = found.drop_duplicates("policy")["of_parameters"]
    ax.hlines(sizes, np.arange(len(policies)) - 0.1, np.arange(len(policies)) + 0.74, "black", "--", lw=0.9)
    ax.annotate("--: of the parameters", (0.72, 0.93), xycoords="axes fraction", fontsize=7)
    ax.set_xticks(np.arange(len(policies)) + 0.32, [p if p == "embedded" else f"{p} (4 bits)" for p in policies])
    ax.set(ylabel="shared table's part of Σ‖g‖²", ylim=(0, 1))
    figure.legend(*ax.get_legend_handles_labels(), title="π", loc="outside right center")
    return figure


def main(options: Options) -> None:
    found = table(options)
    save_figure(draw(found), options.out / "embedding_share.png", found)
    print(found.to_string(index=False, float_format="{:.3f}".format))


if __name__ == "__main__":
    exit_with(lambda: main(tyro.cli(Options, description=__doc__)))
