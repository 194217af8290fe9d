"""Controls that the paper lacks: is it which tokens, or only the steps, the weights' sizes, or the gradient's norm?

    python -m analyses.paper.controls [--out figures] [--scale cpu]

Lopti takes two optimizer steps to GRPO's one, and Reweight shrinks gradients. Each is compared with controls that share
only this: Lopti with passes over a random split of the same sizes, and with GRPO taking twice the optimizer steps (half
the mini-batch); Reweight with its own weights permuted, and with GRPO scaled to the norm of Reweight's gradient. Left:
reward in training; right: paired differences of test accuracy (last three checkpoints) with 95 % t intervals over
seeds. On top are the contrasts that docs/preregistrations.md named before any run was made (at scale cpu those of
analyses/paper/decision.py), with Holm's correction over these; below, the others, corrected over all of them. Sampled
accuracy decides.

controls_contrasts.csv also has greedy accuracy and the differences at each number of people; they decide nothing, and
are corrected among themselves, family by family.
"""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib.pyplot as plt
import pandas as pd
import tyro
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analyses.common.accuracy import KINDS, accuracy_by_people
from analyses.common.colors import COLORS
from analyses.common.contrasts import differences, holm
from analyses.common.curves import BAND, draw_curves, on_common_seeds, smooth
from analyses.common.experiments import labels
from analyses.common.places import save_picture
from analyses.common.read_runs import pages, read_metrics, read_tests
from analyses.common.script import Options, exit_with
from analyses.common.tables import write_csv
from analyses.paper import decision
from gradscope.plots import NEUTRAL, finish, headline, paper_style

NAMED, LOPTI, REWEIGHT = "named beforehand", "Lopti", "Reweight"
PAIRS = {
    LOPTI: [
        ("lopti", "twice-the-steps"),
        ("lopti", "grpo"),
        ("random-split", "grpo"),
        ("twice-the-steps", "grpo"),
    ],
    REWEIGHT: [
        ("reweight", "permuted-weights"),
        ("reweight", "matched-norm"),
        ("permuted-weights", "grpo"),
        ("matched-norm", "grpo"),
    ],
}
"""{block of the figure: pairs of a variant and its comparison}, without the contrasts named beforehand."""
CURVES = {
    "(a) Lopti and its controls": ["grpo", "lopti", "random-split", "twice-the-steps"],
    "(b) Reweight and its controls": ["grpo", "reweight", "permuted-weights", "matched-norm"],
}


def table(scale: str, track: str, variants: list[str]) -> tuple[dict[str, pd.DataFrame], pd.DataFrame]:
    """Return smoothed curves by panel, on the seeds common to the panel, and the contrasts of all kinds and levels."""
    metrics = read_metrics(variants, scale=scale, track=track)
    panels = {title: metrics[metrics["variant"].isin(own)] for title, own in CURVES.items()}
    curves = {title: smooth(on_common_seeds(own), "reward_mean") for title, own in panels.items()}
    named = decision.NAMED if scale == "cpu" else [("reweight", "grpo"), ("lopti", "random-split")]
    return curves, contrast(accuracy_by_people(read_tests(variants, scale=scale, track=track)), named)


def contrast(accuracy: pd.DataFrame, named: Sequence[tuple[str, str]]) -> pd.DataFrame:
    """Return a row per kind of accuracy, level ("all" first) and pair: `compare`'s columns, block, family and decides.

    accuracy: from `accuracy_by_people`; named: the pairs named beforehand. Holm's correction is within each kind and
    family, separately for "all" and for single levels.
    """
    blocks = {NAMED: named} | {block: [pair for pair in pairs if pair not in named] for block, pairs in PAIRS.items()}
    levels = ["all", *(level for level in accuracy["level"].unique() if level != "all")]
    frames = []
    for kind in KINDS:
        for level in levels:
            for block, pairs in blocks.items():
                found = differences(accuracy[accuracy["level"] == level], kind, pairs).assign(block=block)
                frames.append(found.assign(kind=kind, level=level, family=block if block == NAMED else "others"))
    rows = pd.concat(frames, ignore_index=True)
    corrected = [holm(own) for _, own in rows.groupby(["kind", "family", rows["level"] == "all"], sort=False)]
    rows = pd.concat(corrected).sort_index()
    rows["decides"] = (rows["kind"] == "sampled") & (rows["level"] == "all")
    front = ["kind", "level", "family", "block", "decides"]
    return rows[[*front, *rows.columns.drop(front)]]


@paper_style()
def draw(curves: dict[str, pd.DataFrame], contrasts: pd.DataFrame) -> Figure:
    """Draw two panels of curves beside one of differences."""
    figure, panels = plt.subplot_mosaic(
        [["a", "c"], ["b", "c"]], figsize=(7.3, 5.2), layout="constrained", width_ratios=[1, 0.9]
    )
    panels["b"].sharey(panels["a"])
    for name, (title, own) in zip("ab", curves.items(), strict=True):
        draw_curves(panels[name], own, ylabel="reward in training")
        panels[name].set_title(title)
        panels[name].legend(loc="lower right", fontsize=7)
    draw_differences(panels["c"], contrasts[contrasts["level"] == "all"])
    panels["c"].set_title("(c) Differences in test accuracy")
    told = f"(a), (b): {BAND} that all of a panel have\n(c): paired over seeds, 95 % t intervals; p: Holm's"
    headline(figure, "", told)
    return figure


def draw_differences(ax: Axes, contrasts: pd.DataFrame) -> Axes:
    """Draw a row per contrast, sampled (filled) above greedy (open), in blocks labelled by family."""
    words, place, ticks = labels(), 0.0, {}
    across = ax.get_yaxis_transform()
    pairs = contrasts[["block", "variant", "baseline"]].drop_duplicates()
    headings = {
        NAMED: f"{NAMED.capitalize()}: Holm over these {(pairs['block'] == NAMED).sum()}",
        LOPTI: f"{LOPTI}: Holm over these and the next block",
        REWEIGHT: REWEIGHT,
    }
    for block, own in pairs.groupby("block", sort=False):
        # On a white ground, so that the line at 0 does not cross the words.
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        ax.text(0.0, place, headings[block], transform=across, fontsize=7.5, weight="bold", va="center", bbox=box)
        for variant, baseline in own[["variant", "baseline"]].itertuples(index=False):
            place += 1
            ticks[place] = f"{words[variant]}\n− {words[baseline]}"
            rows = contrasts[(contrasts["variant"] == variant) & (contrasts["baseline"] == baseline)].set_index("kind")
            for kind, shift in zip(KINDS, (-0.14, 0.16), strict=True):
                _draw_difference(ax, rows.loc[kind], place + shift, COLORS[variant], full=kind == "sampled")
            ax.text(1.02, place, _tell(rows.loc["sampled"]), transform=across, fontsize=7, va="center")
        place += 1
    ax.axvline(0, color=NEUTRAL, linewidth=0.7, zorder=0)
    ax.set_yticks(list(ticks), list(ticks.values()), fontsize=7)
    ax.tick_params(axis="y", length=0)
    ax.set(ylim=(place - 0.4, -0.5), xlabel="difference in accuracy")
    for kind, face in zip(KINDS, (NEUTRAL, "white"), strict=True):
        ax.plot([], [], "o", color=NEUTRAL, markerfacecolor=face, markersize=4, label=kind)
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=2)
    return finish(ax, contrasts)


def _draw_difference(ax: Axes, row: pd.Series, place: float, color: str, *, full: bool) -> None:
    errors = [[row["difference"] - row["lower"]], [row["upper"] - row["difference"]]]
    face = color if full else "white"
    width = 1.2 if full else 0.7
    ax.errorbar(row["difference"], place, xerr=errors, fmt="o", ms=4, color=color, mfc=face, elinewidth=width)


def _tell(row: pd.Series) -> str:
    """Return a contrast's seeds and corrected p."""
    if not row["seeds"]:
        return "no runs"
    seeds = f"{row['seeds']} seed{'s' if row['seeds'] > 1 else ''}"
    if pd.isna(row["p_holm"]):
        return seeds
    p = "< .001" if row["p_holm"] < 0.001 else f"= {row['p_holm']:.3f}".replace("0.", ".")
    return f"{seeds}\np {p}"


def main(options: Options) -> None:
    for name, track, variants in pages("controls", options.scale):
        curves, contrasts = table(options.scale, track, variants)
        save_picture(draw(curves, contrasts), options.at(f"{name}.png"))
        write_csv(contrasts, options.at(f"{name}_contrasts.csv"), float_format="%.6g")
        deciding = contrasts[contrasts["decides"]].drop(columns=["kind", "level", "family", "decides"])
        print(deciding.to_string(index=False, float_format="{:.3f}".format, na_rep="–"))


if __name__ == "__main__":
    exit_with(lambda: main(tyro.cli(Options, description=__doc__)))
