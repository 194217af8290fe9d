"""Are the intervals' gradients aligned, and how much of them is signal? Cosines and signal-to-noise over training.

    python -m analyses.paper.over_training [--out figures] [--scale cpu]

Drawn from analyses/measure/over_training.py: fresh batches at some checkpoints, with the gradient of the run's own loss
summed over the tokens of each interval of π. A row of panels per method. Gradients of two intervals from one prompt
share noise, so the right panel shows the cosine's signal part, which other prompts would reproduce. Writes
over_training.png and .csv, and over_training_contrasts.csv: which cosines differ from 0, whether the gradient has any
signal, and whether the gradient of unlikely tokens has more than that of likely ones, each averaged over the
checkpoints after step 0 and paired over seeds, with Holm's correction.

The paper has no such figure. Its Fig. 1 (d) only implies that the intervals' gradients are nearly orthogonal: √(Σ of
the four squared norms) is .845, the norm of their sum .82.
"""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import tyro
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analyses.common.contrasts import compare, mean_interval, tell_seeds
from analyses.common.experiments import labels
from analyses.common.measurements import read_table
from analyses.common.places import data_of, save_picture
from analyses.common.script import Options, exit_with
from analyses.common.tables import write_csv
from gradscope.errors import InputError
from gradscope.intervals import EDGES, interval_labels
from gradscope.plots import NEUTRAL, interval_colors, paper_style

MEASURED = "over_training"
LABELS = interval_labels(EDGES)
PAIRS = list(combinations(range(len(LABELS)), 2))
KEYS = ["variant", "seed", "step"]
SIGNAL = "signal-to-noise"


def read_measured(table: str, scale: str) -> pd.DataFrame:
    """Read a table of analyses/measure/over_training.py; intervals are "0", …, "all". Raises InputError without it."""
    found = read_table(MEASURED, f"{table}.csv", scale=scale)
    return found.astype({name: str for name in ("interval", "other") if name in found})


def name(interval: str) -> str:
    """Return an interval's label; "all" is that of all tokens."""
    return interval if interval == "all" else LABELS[int(interval)]


def pair_name(a: int, b: int) -> str:
    """Return both labels of a pair of intervals."""
    return f"{LABELS[a]} · {LABELS[b]}"


def table(scale: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return a row per quantity, variant, step ("after 0": mean over checkpoints) and interval or pair; the contrasts.

    quantity: cosine, its signal part, or signal-to-noise (of one prompt). seeds, mean, lower, upper: over seeds. The
    contrasts are of the first measured variant.
    """
    cosines = read_measured("cosines", scale).query("metric == 'raw' and interval != other")
    gradients = read_measured("gradients", scale).query("metric == 'raw'")
    pairs = cosines[["interval", "other"]].astype(int).itertuples(index=False, name=None)
    cosines = cosines.assign(of=[pair_name(*pair) for pair in pairs])
    parts = [
        cosines.assign(quantity="cosine", value=cosines["cosine"]),
        cosines.assign(quantity="signal part", value=signal_parts(cosines, gradients)),
        gradients.assign(of=gradients["interval"].map(name), quantity=SIGNAL, value=gradients["signal_to_noise"]),
    ]
    values = pd.concat(parts)[["quantity", *KEYS, "of", "value"]]
    pooled = after_start(values)
    drawn = pd.concat([over_seeds(values, step=values["step"]), over_seeds(pooled, step="after 0")], ignore_index=True)
    first = pooled[pooled["variant"] == pooled["variant"].iloc[0]]
    return drawn, contrasts(first)


def signal_parts(cosines: pd.DataFrame, gradients: pd.DataFrame) -> pd.Series:
    """Return each pair's signal part, ⟨E G_a, E G_b⟩/(‖G_a‖·‖G_b‖), estimated without bias.

    The rest of the cosine comes from both intervals' gradients of the same prompts, which share noise.
    """
    norms = gradients.set_index([*KEYS, "interval"])["gradient_norm"]
    pair = [norms.reindex(pd.MultiIndex.from_frame(cosines[[*KEYS, of]])) for of in ("interval", "other")]
    return cosines["signal_product"] / (pair[0].to_numpy() * pair[1].to_numpy())


def after_start(values: pd.DataFrame) -> pd.DataFrame:
    """Return each quantity's mean over steps after 0, by variant and seed. Raises InputError if only 0 was measured."""
    after = values[values["step"] > 0]
    if after.empty:
        raise InputError(
            "only untrained policies were measured; make runs, then python -m analyses.measure.over_training"
        )
    return after.groupby(["quantity", "variant", "seed", "of"], sort=False)["value"].mean().reset_index()


def over_seeds(values: pd.DataFrame, step: pd.Series | str) -> pd.DataFrame:
    """Return mean and 95 % interval over the seeds with a defined value."""
    rows = []
    for key, own in values.assign(step=step).groupby(["quantity", "variant", "step", "of"], sort=False):
        known = own["value"].dropna()
        mean, lower, upper = mean_interval(known) if len(known) else (np.nan, np.nan, np.nan)
        rows.append((*key, len(known), mean, lower, upper))
    return pd.DataFrame(rows, columns=["quantity", "variant", "step", "of", "seeds", "mean", "lower", "upper"])


def contrasts(pooled: pd.DataFrame) -> pd.DataFrame:
    """Compare each pair's cosine and the total signal-to-noise with 0, and the lowest interval's with the highest's."""
    zero = pooled.drop_duplicates("seed").assign(quantity="", of="0", value=0.0)
    rows = pd.concat([pooled, zero])
    pairs = [(f"cosine {pair_name(a, b)}", "0") for a, b in PAIRS]
    pairs += [(f"{SIGNAL} all", "0"), (f"{SIGNAL} {LABELS[0]}", f"{SIGNAL} {LABELS[-1]}")]
    return compare_quantities(rows.assign(quantity=(rows["quantity"] + " " + rows["of"]).str.strip()), pairs)


def compare_quantities(pooled: pd.DataFrame, pairs: list[tuple[str, str]]) -> pd.DataFrame:
    """Run `contrasts.compare` on a variant's quantities; columns are quantity and against instead of two variants."""
    claims = compare(pooled.assign(variant=pooled["quantity"]), "value", pairs)
    claims = claims.rename(columns={"variant": "quantity", "baseline": "against"})
    return claims.assign(variant=pooled["variant"].iloc[0])


@paper_style()
def draw(drawn: pd.DataFrame) -> Figure:
    """Draw a row per method: cosines and signal-to-noise over training, and cosines averaged over training."""
    variants = list(drawn["variant"].unique())
    size = (7.3, 0.8 + 2.1 * len(variants))
    figure, panels = plt.subplots(len(variants), 3, figsize=size, layout="constrained", squeeze=False)
    for row, variant in zip(panels, variants, strict=True):
        own = drawn[drawn["variant"] == variant]
        over, pooled = own[own["step"] != "after 0"], own[own["step"] == "after 0"]
        _draw_lines(row[0], over[over["quantity"] == "cosine"], PAIR_COLORS)
        _draw_lines(row[1], over[over["quantity"] == SIGNAL], INTERVAL_COLORS)
        _draw_pairs(row[2], pooled)
        row[0].set(ylabel="cosine", title=f"{labels()[variant]}, {tell_seeds(over['seeds'])}")
        row[1].set(ylabel="signal / noise, one prompt")
    for panel, words in zip(panels[-1], ("step", "step", "mean over the steps after 0"), strict=True):
        panel.set_xlabel(words)
    panels[0, 1].set_title("Signal in an interval's gradient")
    panels[0, 2].set_title("● cosine   ◇ its signal part", fontsize="medium")
    figure.legend(*panels[0, 1].get_legend_handles_labels(), loc="outside upper center", ncols=len(INTERVAL_COLORS))
    figure.supxlabel(WORDS, fontsize=7)
    return figure


PAIR_COLORS = dict(zip((pair_name(a, b) for a, b in PAIRS), plt.get_cmap("Dark2").colors, strict=False))
INTERVAL_COLORS = dict(zip(LABELS, interval_colors(), strict=True)) | {"all": NEUTRAL}
ENOUGH = 3
"""Seeds needed to draw an interval: with two it is as wide as the figure."""
WORDS = (
    "Means over seeds; bars: 95 % t intervals, from three seeds on. Cosines on the left have the colours of the right. "
    "\nOne over signal / noise is how many prompts' gradient would be half signal"
)


def _draw_lines(ax: Axes, rows: pd.DataFrame, colors: dict[str, tuple[float, ...] | str]) -> None:
    """Draw a line with error bars for each interval or pair, side by side."""
    for place, (of, own) in enumerate(rows.groupby("of", sort=False)):
        own = own.sort_values("step", key=lambda steps: steps.astype(int))
        steps = own["step"].astype(int) + 1.5 * (place - 2)
        ax.plot(steps, own["mean"], color=colors[of], label=of, marker="o", ms=2)
        draw_bars(ax, steps, own, color=colors[of])
    ax.axhline(0.0, color=NEUTRAL, linewidth=0.5)


def draw_bars(ax: Axes, steps: pd.Series, rows: pd.DataFrame, *, color: tuple[float, ...] | str) -> None:
    """Draw the intervals of the rows that rest on enough seeds."""
    known = rows["seeds"] >= ENOUGH
    ax.vlines(steps[known], rows.loc[known, "lower"], rows.loc[known, "upper"], color=color, linewidth=0.6)


def _draw_pairs(ax: Axes, pooled: pd.DataFrame) -> None:
    """Draw both cosines of each pair, one above the other."""
    for shift, quantity, marker in ((0.13, "cosine", "o"), (-0.13, "signal part", "D")):
        rows = pooled[pooled["quantity"] == quantity].set_index("of").reindex(PAIR_COLORS)
        for place, (of, row) in enumerate(rows.iterrows()):
            fill = PAIR_COLORS[of] if marker == "o" else "white"
            if row["seeds"] >= ENOUGH:
                ax.hlines(-place + shift, row["lower"], row["upper"], color=PAIR_COLORS[of], linewidth=0.8)
            ax.plot(row["mean"], -place + shift, marker=marker, ms=4, color=PAIR_COLORS[of], markerfacecolor=fill)
        words = "cosine" if quantity == "cosine" else "its signal part"
        ax.plot(
            [], [], marker=marker, ms=4, ls="", color=NEUTRAL, mfc=NEUTRAL if marker == "o" else "white", label=words
        )
    ax.axvline(0.0, color=NEUTRAL, linewidth=0.5)
    ax.set_yticks(-np.arange(len(PAIR_COLORS)), list(PAIR_COLORS))


def write(figure: Figure, drawn: pd.DataFrame, compared: pd.DataFrame, path: Path) -> None:
    """Write the picture, its data and its contrasts; print what concerns the steps after 0."""
    save_picture(figure, path, drawn)
    write_csv(compared, data_of(path.with_stem(f"{path.stem}_contrasts")), float_format="%.6g")
    print(drawn[drawn["step"] == "after 0"].drop(columns="step").to_string(index=False, float_format="{:.3f}".format))
    print(compared.to_string(index=False, float_format="{:.3g}".format))


def main(options: Options) -> None:
    drawn, compared = table(options.scale)
    write(draw(drawn), drawn, compared, options.at("over_training.png"))


if __name__ == "__main__":
    exit_with(lambda: main(tyro.cli(Options, description=__doc__)))
