"""When do the methods help? Accuracy at three learning rates, on a policy in the paper's regime and a certain one.

    python -m analyses.paper.rates [--out figures]

Named before any of these runs was made (docs/preregistrations.md): the number is sampled accuracy on validation
puzzles, mean of the last three checkpoints; the differences are Reweight − GRPO and Lopti − random split, paired by
seed. Each has three claims, with Holm's correction over all six: the highest rate minus the lowest, the paper's regime
minus `embedded-certain`, and their interaction. rates.png and rates.csv have the differences in each cell,
rates_claims.csv the claims, rates_accuracy.csv each method's accuracy and the track whose rate is chosen for the
decision: its best in the paper's regime, or GRPO's if the 95 % intervals overlap.
"""

from __future__ import annotations

from itertools import product

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import tyro
from matplotlib.figure import Figure
from scipy import stats

from analyses.common.colors import COLORS
from analyses.common.contrasts import holm, mean_interval, summarize, vary
from analyses.common.experiments import configure, labels, list_runs
from analyses.common.places import save_picture
from analyses.common.read_runs import has_runs, last_checkpoints, read_tests
from analyses.common.script import Output as Options, exit_with
from analyses.common.tables import write_csv
from gradscope.plots import paper_style

SCALES = {"cpu": "the paper's regime", "certain": "embedded-certain"}
TRACKS = ("rate-low", "rate-middle", "rate-high")
PAIRS = {"reweight": "grpo", "lopti": "random-split"}
VARIANTS = (*PAIRS, *PAIRS.values())
STEPS = (50, 75, 100)
"""Checkpoints whose mean is compared."""


def read_accuracies() -> pd.DataFrame:
    """Return a row per run: scale, track, variant, seed, accuracy. Raises InputError without any."""
    tracks = [*product(SCALES, TRACKS)]
    frames = []
    for scale, track in [place for place in tracks if has_runs(*place)] or tracks[:1]:
        tests = last_checkpoints(read_tests(VARIANTS, scale=scale, track=track), STEPS)
        own = tests.query("level == 'all'").rename(columns={"avg@4": "accuracy"})
        frames.append(own[["track", "variant", "seed", "accuracy"]].assign(scale=scale))
    return pd.concat(frames, ignore_index=True)


def pair(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the differences: a row per scale, track, method and seed common to it and its comparison."""
    wide = runs.pivot(index=["scale", "track", "seed"], columns="variant", values="accuracy").reindex(columns=VARIANTS)
    parts = [(wide[method] - wide[other]).rename("difference").reset_index() for method, other in PAIRS.items()]
    found = pd.concat([part.assign(variant=method) for part, method in zip(parts, PAIRS, strict=True)])
    return found.dropna().reset_index(drop=True)


def claim(pairs: pd.DataFrame) -> pd.DataFrame:
    """Return a row per method and claim over the seeds that have every cell: difference, interval, p, Holm's p."""
    rows = []
    for method in PAIRS:
        cells = pairs[pairs["variant"] == method].pivot(index="seed", columns=["scale", "track"], values="difference")
        cells = cells.reindex(columns=pd.MultiIndex.from_product([SCALES, TRACKS])).dropna()
        regime, certain = (cells[scale].to_numpy() for scale in SCALES)
        steeper, plainer = regime[:, -1] - regime[:, 0], certain[:, -1] - certain[:, 0]
        claims = {
            "highest rate − lowest": (steeper + plainer) / 2,
            "the paper's regime − certain": regime.mean(1) - certain.mean(1),
            "interaction": steeper - plainer,
        }
        for name, values in claims.items():
            mean, lower, upper = mean_interval(values) if len(values) else (np.nan, np.nan, np.nan)
            p = float(stats.ttest_1samp(values, 0.0).pvalue) if len(values) and vary(values) else np.nan
            row = {"variant": method, "baseline": PAIRS[method], "claim": name, "seeds": len(values)}
            rows.append(row | {"difference": mean, "lower": lower, "upper": upper, "p": p})
    return holm(pd.DataFrame(rows))


def choose(runs: pd.DataFrame) -> dict[str, str]:
    """Return {variant: track whose rate it gets for the decision}; {} until all runs in the paper's regime exist.

    That is the rate with the highest mean accuracy, or GRPO's if the variant's 95 % intervals at both rates overlap.
    """
    planned = {(run.track, run.variant, run.seed) for run in list_runs("cpu") if run.track in TRACKS}
    regime = runs[runs["scale"] == "cpu"]
    if planned - set(regime[["track", "variant", "seed"]].itertuples(index=False, name=None)):
        return {}
    own = summarize(regime, "accuracy", ("variant", "track")).set_index(["variant", "track"])
    best = {variant: own.loc[variant]["mean"].idxmax() for variant in VARIANTS}
    plain = best["grpo"]
    apart = {name: own.loc[(name, track), "lower"] > own.loc[(name, plain), "upper"] for name, track in best.items()}
    return {name: track if apart[name] else plain for name, track in best.items()}


@paper_style()
def draw(cells: pd.DataFrame) -> Figure:
    """Draw both differences against the rate, a panel per policy."""
    figure, axes = plt.subplots(1, 2, figsize=(6.4, 2.6), sharey=True, layout="constrained")
    for ax, (scale, title) in zip(axes, SCALES.items(), strict=True):
        rates = [configure(scale, track, "grpo").learning_rate for track in TRACKS]
        ax.axhline(0, color="0.7", lw=0.8)
        for place, (method, other) in enumerate(PAIRS.items()):
            own = cells[(cells["scale"] == scale) & (cells["variant"] == method)].set_index("track").reindex(TRACKS)
            errors = np.abs(own[["lower", "upper"]].to_numpy().T - own["mean"].to_numpy())
            x = np.array(rates) * (0.96, 1.04)[place]
            name = f"{labels()[method]} − {labels()[other]}"
            ax.errorbar(x, own["mean"], errors, fmt="o-", ms=4, color=COLORS[method], label=name)
        ax.set(xscale="log", xlabel="learning rate, 10⁻⁴", title=title)
        ax.set_xticks(rates, [f"{1e4 * rate:g}" for rate in rates], minor=False)
        ax.minorticks_off()
    axes[0].set_ylabel("difference in accuracy")
    axes[1].legend(loc="upper left")
    return figure


def main(options: Options) -> None:
    runs = read_accuracies()
    pairs = pair(runs)
    cells = summarize(pairs, "difference", ("scale", "track", "variant"))
    claims = claim(pairs)
    save_picture(draw(cells), options.at("rates.png"), cells)
    write_csv(claims, options.at("rates_claims.csv"))
    accuracy = summarize(runs, "accuracy", ("scale", "track", "variant"))
    chosen = choose(runs)
    accuracy["chosen"] = (accuracy["scale"] == "cpu") & (accuracy["track"] == accuracy["variant"].map(chosen))
    write_csv(accuracy, options.at("rates_accuracy.csv"))
    print(cells.to_string(index=False, float_format="{:.3f}".format))
    print(claims.to_string(index=False, float_format="{:.3f}".format))
    rates = [f"{variant} as in {track}" for variant, track in chosen.items()]
    print(f"for the decision: {', '.join(rates) or 'not all runs in the regime of the paper are there yet'}")


if __name__ == "__main__":
    exit_with(lambda: main(tyro.cli(Options, description=__doc__)))
