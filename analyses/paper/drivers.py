"""Does probability or entropy go with the size of a token's gradient, at every place in the network?

    python -m analyses.paper.drivers [--out figures]

Drawn from the measurement `drivers` (analyses/measure/drivers.py): log norms of a policy in training (24 × 8 responses,
every token) regressed on log(1−π) and entropy jointly, on tokens with 1−π > 1e-3; coefficients are standardised,
intervals resample prompts. Beside it, by token class, position, entropy and sign of the advantage: mean norms, and
shares of the tokens and of Σ‖w·g‖ (drivers_by_value.csv).

Differs from the paper: it has no such figure; the 80/20 rule (arXiv:2506.01939) picks tokens by entropy instead.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import pandas as pd
import tyro
from matplotlib.figure import Figure

from analyses.common.measurements import read_table
from analyses.common.places import save_picture
from analyses.common.script import Options, exit_with
from analyses.common.tables import write_csv
from gradscope.plots import paper_style, plot_norm_drivers


def table(options: Options) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the fits, and norms and shares by the value of each driver."""
    fits, shares = (read_table("drivers", name, scale=options.scale) for name in ("fits.csv", "by_value.csv"))
    return fits, shares


@paper_style()
def draw(fits: pd.DataFrame) -> Figure:
    """Draw both coefficients at every place."""
    figure, ax = plt.subplots(figsize=(6.0, 2.8), layout="constrained")
    plot_norm_drivers(fits, ax=ax)
    return figure


def main(options: Options) -> None:
    fits, shares = table(options)
    save_picture(draw(fits), options.at("drivers.png"))
    write_csv(shares, options.at("drivers_by_value.csv"), float_format="%.4g")
    print(fits.to_string(index=False, float_format="{:.3f}".format))
    print(shares.to_string(index=False, float_format="{:.3g}".format))


if __name__ == "__main__":
    exit_with(lambda: main(tyro.cli(Options, description=__doc__)))
