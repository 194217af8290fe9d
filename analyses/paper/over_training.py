"""Are the intervals' gradients aligned, and how much of them is signal? Cosines and signal-to-noise over training.

    python -m analyses.paper.over_training [--out figures] [--scale cpu]

Drawn from analyses/measure/over_training.py: fresh batches at some checkpoints, with the gradient of the run's own loss
summed over the tokens of each interval of π. Gradients of two intervals from one prompt share noise, so the cosine's
signal part, which other prompts would reproduce, is beside it. Writes
over_training.png and .csv, and over_training_contrasts.csv: which cosines differ from 0, whether the gradient has any
signal, and whether the gradient of unlikely tokens has more than that of likely ones, each averaged over the
checkpoints after step 0 and paired over seeds, with Holm's correction.

The paper has no such figure. Its Fig. 1 (d) only implies that the intervals' gradients are nearly orthogonal: √(Σ of
the four squared norms) is .845, the norm of their sum .82.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import tyro
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from analyses.common.colors import COLORS
from analyses.common.contrasts import compare, mean_interval, tell_seeds
from analyses.common.experiments import labels
from analyses.common.measurements import read_table
from analyses.common.places import data_of, save_picture
from analyses.common.script import Options, exit_with
from analyses.common.tables import write_csv
from gradscope.errors import InputError
from gradscope.intervals import EDGES, interval_labels
from gradscope.plots import NEUTRAL, PAGE_WIDTH, headline, paper_style

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
    """Draw the mean over the steps after 0, a colour per method, beside step 0: cosines, and signal to noise."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(PAGE_WIDTH, 4.6), layout="constrained", width_ratios=[1.15, 1])
    own = {quantity: drawn[drawn["quantity"] == quantity] for quantity in ("cosine", "signal part", SIGNAL)}
    draw_rows(left, own["cosine"], [pair_name(a, b) for a, b in PAIRS], of_signal=own["signal part"])
    left.set_title("(a) cosine of two intervals' gradients", loc="left")
    left.plot([], [], "D", ms=4, color=NEUTRAL, mfc="white", label="its signal part")
    draw_rows(right, own[SIGNAL], [*LABELS, "all"])
    right.set_title("(b) signal to noise of one prompt", loc="left")
    figure.legend(*left.get_legend_handles_labels(), loc="outside upper center", ncols=5)
    words = f"Means over {tell_seeds(drawn['seeds'])} of a fresh batch each; bars: 95 % t intervals. "
    steps = ", ".join(sorted({str(step) for step in drawn["step"]} - {"0", "after 0"}, key=int))
    words += f"Methods: mean over steps {steps}. One over (b) is how many prompts' gradient would be half signal."
    return headline(figure, "", words)


ENOUGH = 3
"""Seeds needed to draw an interval: with two it is as wide as the figure."""


def draw_rows(ax: Axes, rows: pd.DataFrame, names: Sequence[str], *, of_signal: pd.DataFrame | None = None) -> None:
    """Draw a row per name (`of`): step 0, then each method's mean over the steps after it, with their intervals."""
    rows, named = rows.astype({"step": str}), labels()
    variants = list(rows["variant"].unique())
    start = rows[(rows["step"] == "0") & (rows["variant"] == variants[0])]
    series = [(start, None, "#b0b0b0", "step 0")] if len(start) else []
    for variant in variants:
        later = [
            None if part is None else part[(part["variant"] == variant) & (part["step"] == "after 0")]
            for part in (rows, of_signal)
        ]
        series.append((*later, COLORS[variant], named[variant]))
    for number, (means, signal, color, label) in enumerate(series):
        shift = 0.2 * (number - (len(series) - 1) / 2)
        for part, fill, moved in ((means, color, -0.035), (signal, "white", 0.035)):
            if part is None:
                continue
            part = part.set_index("of").reindex(names)
            places = np.arange(len(names)) + shift + (moved if signal is not None else 0)
            known = (part["seeds"] >= ENOUGH).to_numpy()
            if fill == color:
                ax.hlines(places[known], part["lower"][known], part["upper"][known], color=color, lw=1.0)
            look = {"ls": "", "color": color, "mfc": fill, "ms": 4 if fill == color else 3.2, "zorder": 3}
            ax.plot(part["mean"], places, "o" if fill == color else "D", label=label if fill == color else None, **look)
    ax.axvline(0.0, color=NEUTRAL, lw=0.6, zorder=0)
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.tick_params(axis="y", length=0)
    ax.xaxis.set_major_locator(MaxNLocator(5))


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
