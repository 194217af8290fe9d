"""Fig. 6 of the paper, the ablations: (a) high-probability tokens masked, (b) Lopti reversed, (c) α and (d) η swept.

    python -m analyses.paper.fig6 [--out figures] [--scale cpu]

(a), (b) Reward in training, on the seeds common to a panel. (c), (d) Sampled test accuracy minus GRPO's at the same
seed, averaged over the last three checkpoints, against α of Reweight (0 would be GRPO, since Eq. 4 then leaves
advantages as they are) and η of Lopti: means over seeds with 95 % t intervals; pale dots are seeds, the shaded range is
the paper's recommendation. fig6_contrasts.csv has these differences, with Holm's correction over the whole figure.

Differs from the paper: the policy, its puzzles, 150 steps; the masked tokens are those with π ≥ ½; the paper's text
gives neither this figure's numbers nor the values swept.
"""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd
import tyro
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analyses.common.accuracy import accuracy_by_people
from analyses.common.colors import COLORS
from analyses.common.contrasts import compare, summarize, tell_seeds
from analyses.common.curves import BAND, draw_curves, on_common_seeds, smooth
from analyses.common.experiments import configure
from analyses.common.places import save_picture
from analyses.common.read_runs import pages, read_metrics, read_tests
from analyses.common.script import Options, exit_with
from analyses.common.tables import write_csv
from gradscope.plots import NEUTRAL, finish, headline, new_panels, paper_style

BASELINE = "grpo"
RECOMMENDED = {"alpha": (0.2, 0.3), "eta": (0.45, 0.55)}
"""§ 5.3: α in [.2, .3], η around .5."""


@dataclass(frozen=True)
class Roles:
    """The variants of each panel, by their settings."""

    masked: list[str]
    """Variant that masks some tokens."""
    reversed: dict[str, float]
    """{Lopti with the high-probability tokens first: its η}."""
    alpha: dict[str, float]
    """{Reweight alone: its α}, ascending."""
    eta: dict[str, float]
    """{Lopti alone, in its own order: its η}, ascending."""

    @property
    def forward(self) -> list[str]:
        """Lopti in its own order at the η of a reversed one."""
        return [variant for variant, eta in self.eta.items() if eta in self.reversed.values()]


@dataclass(frozen=True)
class Tables:
    """The figure's numbers."""

    roles: Roles
    curves: dict[str, pd.DataFrame]
    """{panel: a row per variant and step (`smooth`), on the seeds common to all}."""
    accuracy: pd.DataFrame
    """A row per run: variant, label, seed, sampled, greedy."""
    contrasts: pd.DataFrame
    """A row per claim; those in a sweep have the variant's α or η."""


def assign_roles(scale: str, track: str, variants: list[str]) -> Roles:
    """Find the panels' variants by their configurations."""
    masked, backward, alpha, eta = [], {}, {}, {}
    for variant in variants:
        config = configure(scale, track, variant)
        if config.mask_probs is not None:
            masked.append(variant)
        elif config.reweight_alpha is not None and config.lopti_eta is None:
            alpha[variant] = config.reweight_alpha
        elif config.lopti_eta is not None and config.reweight_alpha is None:
            (eta if config.lopti_order == "low-first" else backward)[variant] = config.lopti_eta
    return Roles(masked, backward, _ascending(alpha), _ascending(eta))


def _ascending(sweep: dict[str, float]) -> dict[str, float]:
    return dict(sorted(sweep.items(), key=lambda item: item[1]))


def table(scale: str, track: str, variants: list[str]) -> Tables:
    """Return curves, final accuracies, and the figure's paired differences of sampled accuracy."""
    roles = assign_roles(scale, track, variants)
    accuracy = accuracy_by_people(read_tests(variants, scale=scale, track=track))
    accuracy = accuracy[accuracy["level"] == "all"].drop(columns="level")
    pairs = [(variant, BASELINE) for variant in [*roles.masked, *roles.reversed]]
    pairs += [(variant, other) for variant in roles.reversed for other in roles.forward]
    pairs += [(variant, BASELINE) for variant in [*roles.alpha, *roles.eta]]
    contrasts = compare(accuracy, "sampled", pairs)
    for name in RECOMMENDED:
        contrasts[name] = contrasts["variant"].map(getattr(roles, name))
    metrics, curves = read_metrics(variants, scale=scale, track=track), {}
    for title, own in (
        ("(a) High-probability tokens masked", roles.masked),
        ("(b) Order of Lopti's passes", [*roles.forward, *roles.reversed]),
    ):
        runs = on_common_seeds(metrics[metrics["variant"].isin([BASELINE, *own])])
        curves[title] = smooth(runs, "reward_mean")
    return Tables(roles, curves, accuracy, contrasts)


@paper_style()
def draw(tables: Tables) -> Figure:
    """Draw the four panels."""
    figure, (mask, order, alpha, eta) = new_panels(4, width=3.65, height=2.55)
    roles = tables.roles
    for ax, (title, own) in zip((mask, order), tables.curves.items(), strict=True):
        draw_curves(ax, own, ylabel="reward in training")
        ax.set_title(title)
        ax.legend(loc="lower right", fontsize=7)
    eta.sharey(alpha)
    eta.sharex(alpha)
    swept = []
    for ax, name, title in ((alpha, "alpha", "(c) α of Reweight"), (eta, "eta", "(d) η of Lopti")):
        swept.append(draw_sweep(ax, tables, getattr(roles, name), shaded=RECOMMENDED[name]))
        ax.set(title=title, xlabel=title[4])
    headline(
        figure,
        "",
        f"(a), (b): {BAND} that all of a panel have\n(c), (d): last three checkpoints, at the same seeds; mean and "
        f"95 % t interval over {tell_seeds(pd.concat(swept))} (pale dots); shaded: the paper's advice",
    )
    return figure


def draw_sweep(ax: Axes, tables: Tables, sweep: dict[str, float], *, shaded: tuple[float, float]) -> pd.Series:
    """Draw what a setting adds to GRPO's accuracy: means with intervals, and each seed.

    Returns the number of seeds of each setting; those without runs are skipped.
    """
    found = tables.contrasts[(tables.contrasts["baseline"] == BASELINE) & (tables.contrasts["seeds"] > 0)]
    found = found[found["variant"].isin(sweep)].assign(setting=lambda rows: rows["variant"].map(sweep))
    by_seed = tables.accuracy.pivot(index="seed", columns="variant", values="sampled")
    ax.axvspan(*shaded, color="#FFF1C2", linewidth=0, zorder=0)
    ax.axhline(0, color=COLORS[BASELINE], linewidth=1)
    ax.plot(found["setting"], found["difference"], color=NEUTRAL, linewidth=0.7, zorder=1)
    for row in found.itertuples():
        color, seeds = COLORS[row.variant], (by_seed[row.variant] - by_seed[BASELINE]).dropna()
        ax.plot([row.setting + 0.012] * len(seeds), seeds, "o", color=color, alpha=0.35, ms=3, markeredgewidth=0)
        errors = [[row.difference - row.lower], [row.upper - row.difference]]
        ax.errorbar(row.setting, row.difference, errors, fmt="o", color=color, markersize=4, elinewidth=1.1)
    ax.set(ylabel="accuracy minus GRPO's", xlim=(-0.05, 1.05))
    finish(ax, found[["variant", "setting", "seeds", "difference", "lower", "upper"]])
    return found["seeds"]


def main(options: Options) -> None:
    for name, track, variants in pages("fig6", options.scale):
        tables = table(options.scale, track, variants)
        save_picture(draw(tables), options.at(f"{name}.png"))
        write_csv(tables.contrasts, options.at(f"{name}_contrasts.csv"), float_format="%.6g")
        print(summarize(tables.accuracy, "sampled").to_string(index=False, float_format="{:.3f}".format), end="\n\n")
        print(tables.contrasts.to_string(index=False, float_format="{:.3f}".format, na_rep="–"))


if __name__ == "__main__":
    exit_with(lambda: main(tyro.cli(Options, description=__doc__)))
