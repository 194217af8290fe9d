"""Fig. 9, 10: math in training, with GRPO, Reweight, Lopti and both: reward, response length, gradient norm, entropy.

    python -m analyses.paper.fig9_10 [--out figures] [--scale cpu]

Writes fig9_10.png (sums) at scale cpu, fig9.png (DSR-Uniform) and fig10.png (ORZ) at scale paper, each with its CSV and
NAME_contrasts.csv: the means of each run's last 50 steps, each method against GRPO. The paper's claim is about the
reward ("improvements … remain clearly observable"); the other records are a family of their own. Holm's correction is
within each family.

A step's gradient norm is the mean over its optimizer steps, before clipping. Each of Lopti's contains only a part of
the tokens, so its smaller mean norm says nothing about stability yet.

Differs from the paper: at scale cpu a policy of 0.1 M parameters and one set of training questions, so one page, and no
accuracy over the whole training, since only the last three checkpoints are judged (Table 1); several seeds.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import tyro
from matplotlib.figure import Figure

from analyses.common.curves import BAND, draw_curves
from analyses.common.math_tracks import TRAINED_ON
from analyses.common.places import save_picture
from analyses.common.read_runs import pages, read_metrics
from analyses.common.records import RECORDS, compare_late, smooth_records
from analyses.common.script import Options, exit_with
from analyses.common.tables import write_table
from gradscope.plots import headline, new_panels, paper_style

SHOWN = ("reward_mean", "response_length", "grad_norm", "entropy")
FAMILIES = {
    "claims": {"reward_mean": "higher"},
    "other records": {"response_length": "none", "grad_norm": "none", "entropy": "none"},
}
"""{family for Holm's correction: {record: the paper's claim about it on math}}."""
PAGES = {"math": "fig9_10", "math-dsr": "fig9", "math-orz": "fig10"}


def table(metrics: pd.DataFrame, variants: Sequence[str]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the smoothed records, and the differences from GRPO at the end of training."""
    curves, others = smooth_records(metrics), [name for name in variants if name != "grpo"]
    frames = [compare_late(metrics, names, others, "grpo").assign(family=key) for key, names in FAMILIES.items()]
    contrasts = pd.concat(frames, ignore_index=True)
    return curves[curves["record"].isin(SHOWN)], contrasts[["family", *contrasts.columns.drop("family")]]


@paper_style()
def draw(curves: pd.DataFrame, trained_on: str) -> Figure:
    """Draw a panel per record."""
    figure, panels = new_panels(len(SHOWN), width=3.6, height=2.3)
    for letter, panel, record in zip("abcd", panels, SHOWN, strict=True):
        title, unit = RECORDS[record]
        draw_curves(panel, curves[curves["record"] == record], ylabel=unit)
        panel.set_title(f"({letter}) {title}", loc="left")
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=len(names))
    headline(figure, "", f"Trained on {trained_on}; {BAND}")
    return figure


def main(options: Options) -> None:
    for _, track, variants in pages("fig9_10", options.scale):
        curves, contrasts = table(read_metrics(variants, scale=options.scale, track=track), variants)
        name = PAGES[track]
        save_picture(draw(curves, TRAINED_ON[track]), options.at(f"{name}.png"), curves.reset_index(drop=True))
        write_table(contrasts, options.at(f"{name}_contrasts.md"))
        print(contrasts.to_string(index=False, float_format="{:.3g}".format))


if __name__ == "__main__":
    exit_with(lambda: main(tyro.cli(Options, description=__doc__)))
