"""A scale's policy before training: Fig. 1 (a, b, d) of the paper, and norms and cosines of its gradients.

    python -m analyses.paper.base_policy [--out figures]

The pictures of `gradscope demo`, from more prompts, drawn from the measurement `base_policy`
(analyses/measure/base_policy.py): fig1_base.png, with means ± standard deviations of norms over batches,
layers_by_interval.png, norm_against_one_minus_prob.png and cosines.png; base_policy.txt has them in words,
base_policy_intervals.csv, _gradients.csv and _theory.csv in columns. Fig. 2 is drawn by analyses/paper/fig2.py.

Differs from the paper: the policy (0.8 M parameters instead of 3 B), its puzzles (2–5 people, compact wording), and the
reference, which is the policy itself, so that the KL term is 0, as at a run's first step.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd
import tyro
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analyses.common.measurements import read_facts, read_table
from analyses.common.places import save_picture
from analyses.common.script import Options, exit_with
from analyses.common.tables import PAPER_NORMS, write_csv
from gradscope.diagnosis import theory_words
from gradscope.gradients import LAYER, LOGITS, PARAMETERS, IntervalGradients, sampling_probabilities
from gradscope.intervals import summarize
from gradscope.objective import PAPER
from gradscope.plots import (
    plot_cosines,
    plot_figure_1,
    plot_layers_by_interval,
    plot_norm_against_one_minus_prob,
)
from gradscope.resampling import Resampling
from gradscope.runs import write_text
from gradscope.theory import TheoryReport, theory_report


def table(options: Options) -> tuple[pd.DataFrame, IntervalGradients, TheoryReport, pd.DataFrame]:
    """Return the token tables of all batches, concatenated; their sums, Prop. 4.2 on them, and a row per interval."""
    names = ("tokens.parquet", "gradients.csv", "cosines.csv")
    tokens, sums, cosines = (read_table("base_policy", name, scale=options.scale) for name in names)
    cosines.columns = cosines.index
    rng = np.random.default_rng(0)
    theory = read_theory(tokens, read_facts("base_policy", scale=options.scale)["vocab_size"], rng=rng)
    gradients = IntervalGradients(sums, cosines, num_prompts=int(tokens["group"].nunique()), settings=PAPER)
    return tokens, gradients, theory, by_interval(tokens, sums, rng)


def by_interval(tokens: pd.DataFrame, sums: pd.DataFrame, rng: np.random.Generator) -> pd.DataFrame:
    """Return each interval's shares of tokens, energy and summed gradient, and mean norms with bounds over prompts."""
    drawn = {"resampling": Resampling(rng), "probabilities": sampling_probabilities(tokens)}
    args, weight = (tokens["interval"], tokens["group"]), tokens["weight"]
    mean = summarize(tokens[PARAMETERS], *args, sizes=tokens[LOGITS], **drawn)
    squares = summarize(weight * tokens[PARAMETERS], *args, statistic="rms", sizes=weight * tokens[LOGITS], **drawn)
    energy, intervals = squares["value"].fillna(0.0) ** 2 * squares["num_tokens"], sums.iloc[:-1]
    columns = {
        "interval": mean["label"],
        "tokens": mean["num_tokens"],
        "measured": mean["num_measured"],
        "token_share": mean["num_tokens"] / mean["num_tokens"].sum(),
        "mean_norm": mean["value"],
        "norm_lower": mean["lower"],
        "norm_upper": mean["upper"],
        "squared_share": energy / energy.sum(),
        "gradient_norm": intervals["norm"] / sums["norm"].iloc[-1],
        "gradient_share": intervals["share"],
        "half_cosine": intervals["half_cosine"],
    }
    return pd.DataFrame(columns).assign(advantage_median=tokens.groupby("interval")["advantage"].median().to_numpy())


def read_theory(tokens: pd.DataFrame, vocab_size: int, *, rng: np.random.Generator | None = None) -> TheoryReport:
    """Return what the token table says about Prop. 4.2."""
    return theory_report(tokens, vocab_size=vocab_size, seed=rng or np.random.default_rng(0))


def shown_layers(tokens: pd.DataFrame) -> list[str]:
    """Return the columns of the first, middle and last layer's norms."""
    depth = sum(name.startswith(LAYER) for name in tokens.columns) - 1
    return [f"{LAYER}{layer}" for layer in sorted({0, depth // 2, depth})]


def tabulate(theory: TheoryReport) -> pd.DataFrame:
    """Return a row per quantity: the norms' power, the share of their variance due to 1−π, their gains (`gain_…`)."""
    gains = theory.gains.add_prefix("gain_").rename(columns={"gain_quantity": "quantity"})
    variance = theory.variance.drop(columns="tokens")
    return theory.powers.merge(variance, on="quantity", how="left").merge(gains, on="quantity", how="left")


def draw(
    tokens: pd.DataFrame, gradients: IntervalGradients, theory: TheoryReport
) -> Iterator[tuple[str, Figure | Axes]]:
    """Draw the pictures; returns them by name."""
    yield "fig1_base", plot_figure_1(tokens, gradients.table.assign(paper=PAPER_NORMS))
    yield "cosines", plot_cosines(gradients.cosines)
    yield "layers_by_interval", plot_layers_by_interval(tokens)
    powers = theory.powers[theory.powers["quantity"].isin([*shown_layers(tokens), PARAMETERS])]
    yield "norm_against_one_minus_prob", plot_norm_against_one_minus_prob(tokens, powers)


def main(options: Options) -> None:
    tokens, gradients, theory, intervals = table(options)
    for name, figure in draw(tokens, gradients, theory):
        save_picture(figure, options.at(f"{name}.png"))
    words = f"{intervals.to_string(index=False, float_format='{:.3g}'.format)}\n\n{theory_words(theory)}\n"
    write_text(options.at("base_policy.txt"), words)
    tables = {"intervals": intervals, "gradients": gradients.table, "theory": tabulate(theory)}
    for name, numbers in tables.items():
        write_csv(numbers, options.at(f"base_policy_{name}.csv"))


if __name__ == "__main__":
    exit_with(lambda: main(tyro.cli(Options, description=__doc__)))
