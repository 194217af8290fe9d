"""What every token weighting would do with a pretrained policy's batch: on- and off-policy, and after training.

    python -m analyses.paper.words_compare [--out figures]

Drawn from the measurement `words_compare` (analyses/measure/words_compare.py): a picture with its CSV for each case,
words_compare_on-policy.png and so on. words_compare.csv has all cases, a row per weighting and optimizer step: the
cosine of its summed gradient with plain GRPO's, the signal to noise of one prompt, the share of the tokens that one SGD
step moves the right way to first order, and others. `reweight` is at the paper's α = .3, `up-weight`, its opposite, at
its authors' .2. Intervals are over prompts of one batch. words_compare_samples.csv describes the sampled responses.

Differs from the paper: it has no such figure; the policy and its task are SmolLM2-135M-Instruct, de-quantised from four
bits, on word problems.
"""

from __future__ import annotations

import pandas as pd
import tyro

from analyses.common.measurements import read_table
from analyses.common.places import save_picture
from analyses.common.script import WordsOptions as Options, exit_with
from analyses.common.tables import write_csv
from gradscope.intervals import interval_labels
from gradscope.plots import plot_comparison


def table(options: Options) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the weightings, and the intervals' shares under each."""
    names = ("weightings.csv", "by_interval.csv")
    weightings, shares = (read_table("words_compare", name, scale=options.scale) for name in names)
    return weightings.fillna({"same_as": ""}), shares


def main(options: Options) -> None:
    weightings, shares = table(options)
    for case, own in weightings.groupby("case", sort=False):
        name = f"words_compare_{case.replace(' ', '_')}.png"
        figure = plot_comparison(own, shares[shares["case"] == case], interval_labels())
        save_picture(figure, options.at(name))
    write_csv(weightings, options.at("words_compare.csv"), float_format="%.6g")
    samples = read_table("words_compare", "samples.csv", scale=options.scale)
    write_csv(samples, options.at("words_compare_samples.csv"))
    shown = ["case", "method", "step", "same_as", "cosine", "signal_to_noise", "right_sgd"]
    print(weightings[shown].to_string(index=False, float_format="{:.3f}".format, na_rep="–"))


if __name__ == "__main__":
    exit_with(lambda: main(tyro.cli(Options, description=__doc__)))
