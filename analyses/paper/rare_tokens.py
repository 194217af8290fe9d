"""Does Reweight leave more rare tokens? The share of sampled tokens with π < ¼ along training, minus GRPO's.

    python -m analyses.paper.rare_tokens [--out figures]

Found after the fact on the decision's runs (embedded policy, 5e-5), so exploratory. Differences are paired by seed,
with 95 % t intervals over seeds and no correction; entropy, which the same tokens drive, is beside it. rare_tokens.csv
has a row per setting (policy and track), record, pair and window of steps: of 25 steps each, and the last 50;
rare_tokens_means.csv each variant's own means. Drawn are the shares over steps, smoothed, and the last 50 steps'
differences in each setting.

The paper has no such figure.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import pandas as pd
import tyro
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analyses.common.contrasts import differences, summarize
from analyses.common.curves import BAND, draw_curves, smooth
from analyses.common.experiments import labels, needs
from analyses.common.places import save_picture
from analyses.common.read_runs import read_metrics
from analyses.common.records import LATE, late_means
from analyses.common.script import Output as Options, exit_with
from analyses.common.tables import write_csv
from gradscope.plots import NEUTRAL, finish, headline, paper_style

NAME, MAIN = "rare_tokens", ("cpu", "puzzles")
RECORDS = {"token_share_0": "share of tokens with π < ¼", "entropy": "entropy"}
PAIRS = [("reweight", "grpo"), ("reweight", "permuted-weights"), ("up-weight", "grpo"), ("lopti", "grpo")]
WINDOW = 25
LAST = f"last {LATE}"
POLICIES = {"cpu": "embedded", "certain": "embedded-certain"}


def table() -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Return the differences, the variants' means, and the smoothed share of the main setting."""
    contrasts, means = [], []
    for scale in POLICIES:
        for track in dict.fromkeys(track for track, _ in needs(NAME, scale)):
            variants = [variant for place, variant in needs(NAME, scale) if place == track]
            metrics = read_metrics(variants, scale=scale, track=track)
            if (scale, track) == MAIN:
                curves = smooth(metrics[metrics["variant"].isin(["grpo", "reweight"])], "token_share_0")
            for window, runs in cut(metrics).items():
                keys = {"scale": scale, "track": track, "steps": window}
                for record in RECORDS:
                    pairs = [pair for pair in PAIRS if {*pair} <= {*runs["variant"]}]
                    contrasts.append(differences(runs, record, pairs).assign(record=record, **keys))
                    means.append(summarize(runs, record).assign(record=record, **keys))
    return pd.concat(contrasts, ignore_index=True), pd.concat(means, ignore_index=True), curves


def cut(metrics: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return a row per run with its records' means, for each window of WINDOW steps and for the last LATE."""
    windows = {}
    for start in range(0, int(metrics["step"].max()), WINDOW):
        inside = metrics[metrics["step"].between(start + 1, start + WINDOW)]
        windows[f"{start + 1} to {start + WINDOW}"] = late_means(inside, list(RECORDS), WINDOW)
    return windows | {LAST: late_means(metrics, list(RECORDS))}


@paper_style()
def draw(contrasts: pd.DataFrame, curves: pd.DataFrame) -> Figure:
    """Draw the share over steps, and the differences of the last steps by setting."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(7.3, 2.8), layout="constrained", width_ratios=(1, 1))
    draw_curves(left, curves, ylabel="share of sampled tokens\nwith π < ¼").set_title("embedded, 5e-5", loc="left")
    left.legend(loc="upper left", fontsize=6.5)
    draw_differences(right, contrasts)
    told = f"Left: {BAND}.\nRight: last {LATE} steps (seeds), 95 % t intervals over seeds, uncorrected."
    headline(figure, "", told)
    return figure


def draw_differences(ax: Axes, contrasts: pd.DataFrame) -> Axes:
    """Draw the differences of the share in the last steps, a row per setting and pair."""
    shown = contrasts[(contrasts["record"] == "token_share_0") & (contrasts["steps"] == LAST)].reset_index(drop=True)
    ax.hlines(shown.index, shown["lower"], shown["upper"], color="black", lw=1)
    ax.plot(shown["difference"], shown.index, "o", color="black", ms=3.5)
    ax.axvline(0, color=NEUTRAL, lw=0.7, zorder=0)
    settings, words = shown["scale"].map(POLICIES) + ", " + shown["track"], shown.replace(labels())
    names = settings + ": " + words["variant"] + " − " + words["baseline"] + " (" + shown["seeds"].astype(str) + ")"
    ax.set_yticks(shown.index, names, fontsize=6)
    ax.invert_yaxis()
    ax.set_xlabel("difference of the share")
    return finish(ax, shown)


def main(options: Options) -> None:
    contrasts, means, curves = table()
    save_picture(draw(contrasts, curves), options.at(f"{NAME}.png"), contrasts)
    write_csv(means, options.at(f"{NAME}_means.csv"))
    print(contrasts.to_string(index=False, float_format="{:.4f}".format))


if __name__ == "__main__":
    exit_with(lambda: main(tyro.cli(Options, description=__doc__)))
