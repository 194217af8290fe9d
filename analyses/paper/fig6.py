"""Fig. 6 of the paper, the ablations: (a) high-probability tokens masked, (b) Lopti reversed, (c) α and (d) η swept.

    python -m analyses.paper.fig6 [--out figures] [--scale cpu]

(a), (b) Reward in training. (c), (d) Sampled accuracy on the test, the last three checkpoints averaged, against α of
Reweight (0 is GRPO: Eq. 4 then leaves advantages as they are) and against η of Lopti: means over seeds with 95 % t
intervals, pale dots are seeds; shaded what the paper recommends. fig6_contrasts.csv has the paired differences, Holm's
correction over all of the figure.

Differs from the paper: the policy, its puzzles, 150 steps; the masked tokens are those with π ≥ ½; the paper's text
has no numbers of this figure, and not which values were swept.
"""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd
import tyro
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analyses.common.accuracy import accuracy_by_people, within_shares
from analyses.common.colors import COLORS
from analyses.common.contrasts import compare, summarize, tell_seeds
from analyses.common.curves import BAND, draw_curves, smooth
from analyses.common.experiments import configure
from analyses.common.read_runs import pages, read_metrics, read_tests
from analyses.common.script import Options, exit_with
from analyses.common.tables import write_csv
from gradscope.plots import NEUTRAL, finish, new_panels, paper_style, save_figure

BASELINE = "grpo"
RECOMMENDED = {"alpha": (0.2, 0.3), "eta": (0.45, 0.55)}
"""§ 5.3: α in [.2, .3], η around .5."""


@dataclass(frozen=True)
class Roles:
    """Which variant stands where, by its settings."""

    masked: list[str]
    """Some tokens left out."""
    reversed: dict[str, float]
    """Lopti with the high-probability tokens first → its η."""
    alpha: dict[str, float]
    """Reweight alone → its α, ascending."""
    eta: dict[str, float]
    """Lopti alone, in its own order → its η, ascending."""

    @property
    def forward(self) -> list[str]:
        """Lopti in its own order at the η of a reversed one."""
        return [variant for variant, eta in self.eta.items() if eta in self.reversed.values()]


@dataclass(frozen=True)
class Tables:
    """The numbers of the figure."""

    roles: Roles
    curves: pd.DataFrame
    """A row per variant and step: see `smooth`."""
    accuracy: pd.DataFrame
    """A row per run: variant, label, seed, sampled, greedy."""
    contrasts: pd.DataFrame
    """A row per claim, with the variant's α or η where it belongs to a sweep."""


def assign_roles(scale: str, track: str, variants: list[str]) -> Roles:
    """The panels' variants, found by what their configurations say."""
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
    """Curves, final accuracies and the figure's paired differences of sampled accuracy."""
    roles = assign_roles(scale, track, variants)
    accuracy = accuracy_by_people(read_tests(variants, scale=scale, track=track))
    accuracy = accuracy[accuracy["level"] == "all"].drop(columns="level")
    pairs = [(variant, BASELINE) for variant in [*roles.masked, *roles.reversed]]
    pairs += [(variant, other) for variant in roles.reversed for other in roles.forward]
    pairs += [(variant, BASELINE) for variant in [*roles.alpha, *roles.eta]]
    contrasts = compare(accuracy, "sampled", pairs)
    for name in RECOMMENDED:
        contrasts[name] = contrasts["variant"].map(getattr(roles, name))
    curves = smooth(read_metrics(variants, scale=scale, track=track), "reward_mean")
    return Tables(roles, curves, accuracy, contrasts)


@paper_style()
def draw(tables: Tables) -> Figure:
    """The four panels."""
    figure, (mask, order, alpha, eta) = new_panels(4, width=3.65, height=2.55)
    roles, curves = tables.roles, tables.curves
    for ax, variants, title in (
        (mask, [BASELINE, *roles.masked], "(a) High-probability tokens masked"),
        (order, [BASELINE, *roles.forward, *roles.reversed], "(b) Order of Lopti's passes"),
    ):
        draw_curves(ax, curves[curves["variant"].isin(variants)], ylabel="reward in training")
        ax.set_title(title)
        ax.legend(loc="lower right", fontsize=7)
    draw_sweep(alpha, tables.accuracy, {BASELINE: 0.0} | roles.alpha, shaded=RECOMMENDED["alpha"])
    alpha.set(title="(c) α of Reweight; GRPO at 0", xlabel="α")
    eta.sharey(alpha)
    eta.sharex(alpha)
    draw_baseline(eta, tables.accuracy)
    draw_sweep(eta, tables.accuracy, roles.eta, shaded=RECOMMENDED["eta"])
    eta.set(title="(d) η of Lopti", xlabel="η")
    eta.legend(loc="lower left", fontsize=7)
    within_shares(eta)  # alpha's too: they share it
    swept = tables.accuracy[tables.accuracy["variant"].isin([BASELINE, *roles.alpha, *roles.eta])]
    figure.supxlabel(
        f"(a), (b): {BAND}\n(c), (d): last three checkpoints; mean and 95 % t interval over "
        f"{tell_seeds(swept.groupby('variant')['seed'].nunique())} (pale dots), cut at 0 and 1; "
        "shaded: the paper's advice",
        fontsize=7,
    )
    return figure


def draw_sweep(ax: Axes, accuracy: pd.DataFrame, sweep: dict[str, float], *, shaded: tuple[float, float]) -> Axes:
    """Sampled accuracy against a setting: means with their intervals, and each seed; what was not run is left out."""
    own = accuracy[accuracy["variant"].isin(sweep)]
    means = summarize(own, "sampled")
    means = means.assign(setting=means["variant"].map(sweep)).sort_values("setting")
    ax.axvspan(*shaded, color="#FFF1C2", linewidth=0, zorder=0)
    ax.plot(means["setting"], means["mean"], color=NEUTRAL, linewidth=0.7, zorder=1)
    for row in means.itertuples():
        color, seeds = COLORS[row.variant], own.loc[own["variant"] == row.variant, "sampled"]
        ax.plot([row.setting + 0.012] * len(seeds), seeds, "o", color=color, alpha=0.35, ms=3, markeredgewidth=0)
        errors = [[row.mean - row.lower], [row.upper - row.mean]]
        ax.errorbar(row.setting, row.mean, errors, fmt="o", color=color, markersize=4, elinewidth=1.1)
    ax.set(ylabel="accuracy, sampled", xlim=(-0.05, 1.05))
    return finish(ax, means)


def draw_baseline(ax: Axes, accuracy: pd.DataFrame) -> None:
    """GRPO's mean as a line, its interval as a band."""
    for row in summarize(accuracy[accuracy["variant"] == BASELINE], "sampled").itertuples():
        ax.axhline(row.mean, color=COLORS[BASELINE], linewidth=1, label="GRPO, 95 % interval")
        ax.axhspan(row.lower, row.upper, color=COLORS[BASELINE], alpha=0.12, linewidth=0)


def main(options: Options) -> None:
    """Draw the figure and write its contrasts."""
    for name, track, variants in pages("fig6", options.scale):
        tables = table(options.scale, track, variants)
        save_figure(draw(tables), options.out / f"{name}.png")
        write_csv(tables.contrasts, options.out / f"{name}_contrasts.csv", float_format="%.6g")
        print(summarize(tables.accuracy, "sampled").to_string(index=False, float_format="{:.3f}".format), end="\n\n")
        print(tables.contrasts.to_string(index=False, float_format="{:.3f}".format, na_rep="–"))


if __name__ == "__main__":
    exit_with(lambda: main(tyro.cli(Options, description=__doc__)))
