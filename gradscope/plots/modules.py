"""The figure of the modules that drive a token's norm."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from gradscope.errors import InputError, checked
from gradscope.gradients import PARAMETERS, sampling_weights
from gradscope.plots.style import NEUTRAL, finish, new_axes, paper_style


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
