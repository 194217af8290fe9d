"""Fig. 2 of the paper with measured points: norms of token gradients in the feasible cones of Eq. 3, against π.

    python -m analyses.paper.fig2 [--out figures]

Drawn from the measurement `base_policy` (analyses/measure/base_policy.py), a policy before training. At the logits the
cone is a theorem; at the layers it is spanned by the plotted tokens' smallest and largest gains, so it shows how wide
these are and proves nothing.

Differs from the paper: its figure is a drawing, without data.
"""

from __future__ import annotations

import pandas as pd
import tyro
from matplotlib.figure import Figure

from analyses.common.measurements import read_facts, read_table
from analyses.common.places import save_picture
from analyses.common.script import Options, exit_with
from analyses.paper.base_policy import read_theory, shown_layers
from gradscope.plots import plot_figure_2
from gradscope.theory import TheoryReport, measured_cones


def table(options: Options) -> tuple[pd.DataFrame, TheoryReport, int]:
    """Return the token table, what it says about Prop. 4.2, and the vocabulary size."""
    tokens = read_table("base_policy", "tokens.parquet", scale=options.scale)
    vocab_size = read_facts("base_policy", scale=options.scale)["vocab_size"]
    return tokens, read_theory(tokens, vocab_size), vocab_size


def draw(tokens: pd.DataFrame, theory: TheoryReport, vocab_size: int) -> Figure:
    """Draw a panel for the logits and three layers."""
    return plot_figure_2(tokens, measured_cones(theory, shown_layers(tokens)), vocab_size=vocab_size)


def main(options: Options) -> None:
    tokens, theory, vocab_size = table(options)
    save_picture(draw(tokens, theory, vocab_size), options.at("fig2.png"))
    print(theory.logit_bounds)
    print(theory.gains.to_string(index=False, float_format="{:.3g}".format))


if __name__ == "__main__":
    exit_with(lambda: main(tyro.cli(Options, description=__doc__)))
