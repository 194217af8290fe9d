"""Fig. 7, 8: training records on puzzles, with GRPO, Reweight, Lopti and both.

    python -m analyses.paper.fig7_8 [--out figures] [--scale cpu]

Writes fig7_8.png with its CSV, fig7_8_accuracy.csv (the judged checkpoints), and fig7_8_contrasts.csv: the paper's
claims about these records (App. C.1.1), means over the last 50 steps against GRPO's, with Holm's correction over all
six.

A step's gradient norm is the mean over its optimizer steps, before clipping. Each of Lopti's contains only a part of
the tokens, so its smaller mean norm says nothing about stability yet.

Differs from the paper: one policy in place of two (one page); accuracy by number of people is known at the judged
checkpoints only; entropy and KL are added.
"""

from __future__ import annotations

import pandas as pd
import tyro

from analyses.common.places import save_picture
from analyses.common.read_runs import pages, read_metrics, read_tests
from analyses.common.records import accuracy_by_step, compare_late, draw_records, smooth_records
from analyses.common.script import Options, exit_with
from analyses.common.tables import write_table

CLAIMS = {"grad_norm": "lower", "response_length": "slightly longer"}
"""About Reweight, Lopti and both, against GRPO."""


def table(scale: str, track: str, variants: list[str]) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Return the smoothed records, accuracy at the judged checkpoints, and the contrasts."""
    metrics = read_metrics(variants, scale=scale, track=track)
    accuracy = accuracy_by_step(read_tests(variants, scale=scale, track=track))
    others = [variant for variant in variants if variant != "grpo"]
    return smooth_records(metrics), accuracy, compare_late(metrics, CLAIMS, others, "grpo")


draw = draw_records


def main(options: Options) -> None:
    for name, track, variants in pages("fig7_8", options.scale):
        curves, accuracy, contrasts = table(options.scale, track, variants)
        save_picture(draw(curves, accuracy), options.at(f"{name}.png"), curves)
        write_table(accuracy, options.at(f"{name}_accuracy.md"))
        write_table(contrasts, options.at(f"{name}_contrasts.md"))
        print(contrasts.to_string(index=False, float_format="{:.3g}".format))


if __name__ == "__main__":
    exit_with(lambda: main(tyro.cli(Options, description=__doc__)))
