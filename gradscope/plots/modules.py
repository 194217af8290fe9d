"""Figures of proxies for a token's norm, and of the modules that drive the norm."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gradscope.errors import InputError, checked
from gradscope.gradients import ADAMW, PARAMETERS, sampling_weights
from gradscope.plots.style import NEUTRAL, finish, new_axes, new_panels, paper_style, require


@paper_style()
@checked
def plot_proxies(proxies: pd.DataFrame, *, parameters: str = "all parameters") -> Figure:
    """Draw how well each proxy stands for the exact norm: rank correlation, R² of logs, share of largest tokens found.

    proxies: `theory.judge_proxies`; drawn for the norm over all parameters, also AdamW-preconditioned if known. Bars
    are 95 % intervals over prompts. parameters: what ‖g‖ is over.
    """
    panels = {"spearman": "Rank correlation", "r2": "R² of the logarithms", "found": "Largest 1 % found"}
    require(proxies, ["quantity", "proxy", *panels], what="the table of proxies")
    kinds = {PARAMETERS: (f"‖g‖ over {parameters}", "black"), ADAMW: ("AdamW-preconditioned", "#2a7f62")}
    kinds = {name: told for name, told in kinds.items() if (proxies["quantity"] == name).any()}
    figure, axes = new_panels(len(panels), width=2.4, height=2.3)
    for ax, (column, title) in zip(axes, panels.items(), strict=True):
        parts = []
        for number, (quantity, (word, color)) in enumerate(kinds.items()):
            own = proxies[proxies["quantity"] == quantity].reset_index(drop=True)
            height = np.arange(len(own)) + 0.2 * (number - (len(kinds) - 1) / 2)
            ax.hlines(height, own[f"{column}_lower"], own[f"{column}_upper"], color=color, lw=0.9)
            ax.plot(own[column], height, "o", color=color, ms=3.5, label=word)
            parts.append(own[["quantity", "proxy", "tokens", column, f"{column}_lower", f"{column}_upper"]])
        ax.set_yticks(range(len(own)), own["proxy"] if ax is axes[0] else [""] * len(own))
        ax.tick_params(axis="y", length=0)
        ax.invert_yaxis()
        ax.set_xlim(min(0.0, ax.get_xlim()[0]), 1.02)
        ax.set_xticks([0.0, 0.5, 1.0])
        ax.set_title(title, loc="left")
        finish(ax, pd.concat(parts, ignore_index=True))
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(kinds))
    return figure


@paper_style()
@checked
def plot_modules(table: pd.DataFrame, *, most: int = 24) -> Axes:
    """Draw which matrices drive the norm: the share of the energy, in percent, of the `most` largest modules.

    table: from `measure` with per_module; without weights the energy is Σ‖g‖². Raises InputError without such columns.
    """
    prefix = f"{PARAMETERS}."
    names = [name for name in table if name.startswith(prefix)]
    if not names:
        raise InputError("the token table has no column of a single module; measure with per_module (--per-module)")
    weight = table["weight"].to_numpy(np.float64)
    weight = np.ones(len(table)) if np.isnan(weight).any() else weight
    counts = sampling_weights(table)
    squares = pd.Series({name: np.nansum(counts * (weight * table[name].to_numpy(np.float64)) ** 2) for name in names})
    shares = (100 * squares / squares.sum()).sort_values(ascending=False, kind="stable")[:most]
    drawn = pd.DataFrame({"module": [name.removeprefix(prefix) for name in shares.index], "percent": shares.to_numpy()})
    ax = new_axes(None, width=4.6, height=0.9 + 0.17 * len(drawn))
    ax.barh(drawn["module"], drawn["percent"], color=NEUTRAL, height=0.7)
    ax.invert_yaxis()
    ax.set(xlabel="share of the gradient energy (%)", title="Which module drives the norm")
    return finish(ax, drawn)
