"""Fig. 11, 12 and Table 7: REINFORCE++, alone and with Reweight, Lopti and both.

    python -m analyses.paper.fig11_12 [--out figures] [--scale cpu]

Writes fig11_12.png (training records) with its CSV, fig11_12_accuracy.csv (the judged checkpoints), table7.csv and .md
(accuracy by number of people, beside the paper's) and fig11_12_contrasts.csv: each method against plain REINFORCE++,
and the latter against GRPO (in the paper slightly worse), in sampled accuracy, with Holm's correction over the claims.

Differs from the paper: one policy in place of two (one page); several seeds, with intervals; accuracy by number of
people is known at the judged checkpoints only; entropy and KL are added.
"""

from __future__ import annotations

import pandas as pd
import tyro

from analyses.common.accuracy import (
    Paper,
    accuracy_by_people,
    average,
    beside_paper,
    correct_families,
    differences_by_people,
    lay_out,
    untrained,
)
from analyses.common.places import save_picture
from analyses.common.read_runs import pages, read_metrics, read_tests
from analyses.common.records import accuracy_by_step, draw_records, smooth_records
from analyses.common.script import Options, exit_with
from analyses.common.tables import write_table

PAPER: Paper = {
    "Qwen2.5-3B-Instruct": {
        "untrained": (0.09, 0.10, 0.03, 0.05, 0.02, 0.06),
        "rpp": (0.37, 0.31, 0.20, 0.21, 0.06, 0.23),
        "rpp-reweight": (0.53, 0.44, 0.31, 0.26, 0.14, 0.34, 46.1),
        "rpp-lopti": (0.47, 0.36, 0.26, 0.26, 0.12, 0.29, 27.8),
        "rpp-both": (0.61, 0.49, 0.38, 0.34, 0.21, 0.41, 76.5),
    },
    "Qwen2.5-7B-Instruct-1M": {
        "untrained": (0.22, 0.15, 0.08, 0.10, 0.02, 0.11),
        "rpp": (0.68, 0.72, 0.54, 0.42, 0.43, 0.56),
        "rpp-reweight": (0.81, 0.77, 0.66, 0.62, 0.48, 0.67, 19.7),
        "rpp-lopti": (0.89, 0.85, 0.71, 0.66, 0.51, 0.72, 29.7),
        "rpp-both": (0.87, 0.88, 0.81, 0.71, 0.69, 0.79, 41.9),
    },
}
"""The paper's Table 7."""


def table(scale: str, track: str, variants: list[str]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return Table 7, accuracies beside the paper's (with the untrained policy's, if measured), and the contrasts."""
    accuracy = accuracy_by_people(read_tests([*variants, "grpo"], scale=scale, track=track))
    own = accuracy[accuracy["variant"] != "grpo"]
    means = pd.concat([untrained(scale, track), average(own)], ignore_index=True)
    return beside_paper(means, PAPER), compare(accuracy, [variant for variant in variants if variant != "rpp"])


def compare(accuracy: pd.DataFrame, variants: list[str]) -> pd.DataFrame:
    """Return `compare_by_people`'s rows against REINFORCE++ and, over all puzzles, the latter's against GRPO.

    The slopes are no claims of the paper here, but a family of their own.
    """
    ours, plain = differences_by_people(accuracy, variants, "rpp"), differences_by_people(accuracy, ["rpp"], "grpo")
    rows = pd.concat([ours, plain[plain["of"] == "all"]], ignore_index=True)
    rows["family"] = rows["family"].mask(rows["of"] == "slope per person", "slopes")
    return correct_families(rows)


draw = draw_records


def main(options: Options) -> None:
    for name, track, variants in pages("fig11_12", options.scale):
        curves = smooth_records(read_metrics(variants, scale=options.scale, track=track))
        judged = accuracy_by_step(read_tests(variants, scale=options.scale, track=track))
        accuracies, contrasts = table(options.scale, track, variants)
        shown = lay_out(accuracies, contrasts[contrasts["baseline"] == "rpp"], PAPER)
        save_picture(draw(curves, judged), options.at(f"{name}.png"), curves)
        write_table(judged, options.at(f"{name}_accuracy.md"))
        write_table(accuracies, options.at(f"{name.replace('fig11_12', 'table7')}.md"), shown=shown)
        write_table(contrasts, options.at(f"{name}_contrasts.md"))
        print(shown.to_string(index=False), contrasts.to_string(index=False, float_format="{:.3f}".format), sep="\n\n")


if __name__ == "__main__":
    exit_with(lambda: main(tyro.cli(Options, description=__doc__)))
