"""Fig. 1 of the paper on real language, all six panels: a pretrained policy on word problems, four batches.

    python -m analyses.paper.pretrained_batches [--out figures]

Drawn from the measurement `pretrained_batches` (analyses/measure/pretrained_batches.py).
pretrained_POLICY_TEMPERATURE.png is arranged like the paper's Fig. 1 (`analyses.paper.fig1`); pretrained_norms.png has
every panel (d) beside the paper's and the embedded policy's, with 95 % t intervals over the four batches.
pretrained_similarity.csv has the correlations of (e) and (f) with (c), pretrained_powers.csv the powers of 1 − π that
norms follow, pretrained_samples.csv what was sampled.

Differs from the paper: the policy, its task, and batches of 8 × 8 responses of at most 48 tokens.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import tyro
from matplotlib.figure import Figure
from scipy.stats import t as student

from analyses.common.measurements import read_facts, read_table
from analyses.common.places import save_picture
from analyses.common.script import WordsOptions as Options, exit_with
from analyses.common.tables import PAPER_NORMS, write_csv
from analyses.paper import fig1
from gradscope.intervals import interval_labels
from gradscope.plots import POLICIES, headline, paper_style
from gradscope.theory import theory_report

TABLES = ("tokens.parquet", "moves.parquet", "gradients.csv", "similarity.csv", "samples.csv")
KEYS = ["policy", "temperature"]
NAMES = {"smollm2-words": "SmolLM2-135M, warm-started"}


def table(options: Options) -> dict[str, pd.DataFrame]:
    """Return the measurement's tables by file name; similarities with means over the batches."""
    found = {name.split(".")[0]: read_table("pretrained_batches", name, scale=options.scale) for name in TABLES}
    return found | {"similarity": fig1.over_batches(found["similarity"], KEYS)}


def pick(rows: pd.DataFrame, keys: tuple[str, float]) -> pd.DataFrame:
    """Return one policy's rows at one temperature."""
    return rows[(rows["policy"] == keys[0]) & (rows["temperature"] == keys[1])]


def mean_norms(gradients: pd.DataFrame) -> pd.DataFrame:
    """Return panel (d)'s norms by interval beside the paper's: means and standard deviations over the batches."""
    by_interval = gradients.groupby(["interval", "label"], sort=False)["norm"]
    found = by_interval.mean().to_frame("norm").assign(norm_sd=by_interval.std(), batches=by_interval.count())
    return found.reset_index().assign(paper=PAPER_NORMS)


def compare(gradients: pd.DataFrame) -> pd.DataFrame:
    """Return shares of the tokens and relative norms, with means and 95 % t intervals over the batches."""
    base, rows = read_table("base_policy", "gradients.csv")["norm"].to_numpy(), []
    for keys, own in gradients.groupby(KEYS, sort=False):
        table = own.pivot(index="batch", columns="interval", values=["norm", "num_tokens", "share"])
        for place, label in enumerate(interval_labels()):
            numbers = {
                "norm_ratio": table["norm"][str(place)] / table["norm"]["all"],
                "token_share": table["num_tokens"][str(place)] / table["num_tokens"]["all"],
                "gradient_share": table["share"][str(place)],
            }
            others = {"norm_ratio": {"paper": PAPER_NORMS[place] / PAPER_NORMS[-1], "embedded": base[place] / base[-1]}}
            for quantity, values in numbers.items():
                half = float(student.ppf(0.975, len(values) - 1) * values.sem())
                row = dict(zip(KEYS, keys, strict=True)) | {"quantity": quantity, "interval": label}
                row |= {"mean": values.mean(), "lower": values.mean() - half, "upper": values.mean() + half}
                rows.append(row | {"batches": len(values)} | others.get(quantity, {}))
    return pd.DataFrame(rows)


@paper_style()
def draw_norms(compared: pd.DataFrame) -> Figure:
    """Draw panel (d) of the paper, the embedded policy and the pretrained ones, side by side."""
    figure, ax = plt.subplots(figsize=(4.8, 2.9), layout="constrained")
    ratios = compared[compared["quantity"] == "norm_ratio"]
    first = ratios.drop_duplicates("interval")
    places = np.arange(len(first))
    ax.plot(places - 0.3, first["paper"], "D", mfc="white", mec=POLICIES["paper"], label="paper, 3 B, T = 0.7")
    ax.plot(places - 0.18, first["embedded"], "s", color=POLICIES["embedded"], label="embedded, 0.8 M, T = 0.7")
    for number, (keys, own) in enumerate(ratios.groupby(KEYS, sort=False)):
        errors = np.abs(own[["lower", "upper"]].to_numpy().T - own["mean"].to_numpy())
        look = {"fmt": "o^sv"[number % 4], "ms": 4, "capsize": 2, "color": POLICIES["smollm2"]}
        label = f"{NAMES[str(keys[0])]}, T = {keys[1]:g}"
        ax.errorbar(places - 0.06 + 0.12 * number, own["mean"], errors, label=label, **look)
    ax.set_xticks(places, first["interval"])
    ax.set(xlabel="π of the tokens in the loss", ylabel="norm of summed gradient\nover that of all (95 %)")
    ax.set_ylim(0)
    ax.legend(loc="upper right")
    return figure


def main(options: Options) -> None:
    found, sizes = table(options), read_facts("pretrained_batches", scale=options.scale)["vocab_size"]
    compared, powers = compare(found["gradients"]), []
    for keys, _ in found["samples"].groupby(KEYS, sort=False):
        of = {name: pick(rows, keys).reset_index(drop=True) for name, rows in found.items()}
        figure = fig1.draw(of["moves"], mean_norms(of["gradients"]), of["similarity"].assign(optimizer="sgd"))
        words = f"{NAMES[keys[0]]}, de-quantised from four bits, T = {keys[1]:g}."
        headline(figure, "", f"{words} {fig1.WORDS}")
        save_picture(figure, options.at(f"pretrained_{keys[0]}_{keys[1]:g}.png"))
        fit = theory_report(of["tokens"], vocab_size=sizes[keys[0]], seed=0).powers
        powers.append(fit.assign(policy=keys[0], temperature=keys[1]))
    save_picture(draw_norms(compared), options.at("pretrained_norms.png"), compared)
    tables = {"similarity": found["similarity"], "samples": found["samples"]}
    for name, rows in (tables | {"powers": pd.concat(powers)}).items():
        write_csv(rows, options.at(f"pretrained_{name}.csv"), float_format="%.4g")
    print(compared.to_string(index=False, float_format="{:.3f}".format))


if __name__ == "__main__":
    exit_with(lambda: main(tyro.cli(Options, description=__doc__)))
