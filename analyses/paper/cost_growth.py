"""How the cost of a token's exact gradient norms grows: measured on one core, beside the plan's prediction.

    python -m analyses.paper.cost_growth [--out figures]

Drawn from the measurement `cost_growth` (analyses/measure/cost_growth.py): CPU time of one thread, and what
`gradscope measure --plan` predicts from the machine's speeds. cost_growth.csv has the points.
"""

from __future__ import annotations

import pandas as pd
import tyro
from matplotlib.figure import Figure

from analyses.common.measurements import read_table
from analyses.common.places import save_picture
from analyses.common.script import Options, exit_with
from gradscope.plots import NEUTRAL, finish, new_panels, paper_style

NAMES = {
    "length": "tokens of a sequence",
    "hidden": "hidden size",
    "layers": "layers",
    "vocab": "vocabulary",
    "responses": "responses",
}


def table(options: Options) -> pd.DataFrame:
    """Return CPU milliseconds per token by the quantity varied."""
    return read_table("cost_growth", "growth.csv", scale=options.scale)


@paper_style()
def draw(table: pd.DataFrame) -> Figure:
    """Draw a panel per quantity on a common scale: measured points, predicted line."""
    every = pd.concat([table.measured_ms, table.predicted_ms])
    ticks = [t for t in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100) if every.min() / 1.5 <= t <= 1.5 * every.max()]
    figure, axes = new_panels(len(NAMES), width=2.4, height=2.1)
    for ax, name in zip(axes, NAMES, strict=True):
        rows = table[table.varied == name]
        ax.plot(rows.value, rows.predicted_ms, color=NEUTRAL, label="predicted")
        ax.plot(rows.value, rows.measured_ms, "o", color="black", ms=4, label="measured")
        ax.set(xscale="log", yscale="log", xlabel=NAMES[name], ylabel="CPU ms per token")
        ax.set(ylim=(every.min() / 1.5, 1.5 * every.max()))
        ax.set_xticks(rows.value, [f"{value:,}" for value in rows.value])
        ax.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        ax.minorticks_off()
        ax.set_title(f"against {NAMES[name]}", loc="left")
        finish(ax, rows)
    axes[0].legend()
    return figure


def main(options: Options) -> None:
    points = table(options)
    save_picture(draw(points), options.at("cost_growth.png"), points)
    print(points.to_string(index=False))


if __name__ == "__main__":
    exit_with(lambda: main(tyro.cli(Options, description=__doc__)))
