"""Where in the network the gradient energy is, by kind of module."""

from __future__ import annotations

import numpy as np
import pandas as pd

from gradscope.diagnosis.measured import Measured
from gradscope.diagnosis.page.page import Block
from gradscope.diagnosis.page.sheets import Sheets, csv, redraw
from gradscope.diagnosis.result import Diagnosis
from gradscope.diagnosis.rows import Rows
from gradscope.diagnosis.terms import energy_factors
from gradscope.gradients import PARAMETERS
from gradscope.plots import plot_module_shares
from gradscope.policy import Policy, float_parameters, module_groups

TITLE = "Module by module"
ASKS = ("table",)
FOLDED = True
LABELS = {
    "parameter_share": "share of the parameters",
    "low_share": "share of the energy in the lowest interval",
}


def rows(m: Measured) -> Rows:
    """modules: the table of `module_shares`, if the token table has norms by group of modules."""
    shares = module_shares(m.table, m.policy) if m.weighted else None
    return Rows(frames={} if shares is None else {"modules": shares})


def module_shares(table: pd.DataFrame, policy: Policy) -> pd.DataFrame | None:
    """Compute shares of Σ‖w·g‖² by module group; None unless measured with `measure(module_groups=True)`.

    Columns: module, a group of `policy.module_groups`; parameter_share, of the measured parameters; squared_share; and
    low_share, of the sum over the tokens of the lowest interval alone.
    """
    parameters, sizes = dict(float_parameters(policy.model)), {}
    for name, (_, group) in module_groups(policy).items():
        if f"{PARAMETERS}.{group}" in table:
            sizes[group] = sizes.get(group, 0) + parameters[name].numel()
    if not sizes:
        return None
    squares = table[[f"{PARAMETERS}.{group}" for group in sizes]].to_numpy(np.float64) ** 2
    squares *= (energy_factors(table) * table["weight"].to_numpy() ** 2)[:, None]
    columns: dict[str, object] = {"module": [*sizes]}
    lowest = squares[table["interval"].to_numpy() == 0]
    sums = {"parameter_share": np.array([*sizes.values()]), "squared_share": np.nansum(squares, 0)}
    sums |= {"low_share": np.nansum(lowest, 0)}
    with np.errstate(invalid="ignore"):  # no token there
        columns |= {name: values / values.sum() for name, values in sums.items()}
    return pd.DataFrame(columns).sort_values("squared_share", ascending=False, kind="stable", ignore_index=True)


def show(found: Diagnosis, sheets: Sheets) -> list[Block]:
    modules = found.frames.get("modules")
    if modules is None or len(modules) < 2:
        return []
    caption = (
        "Where in the network this batch's gradient energy is: each module's share of it, summed over all blocks, "
        "next to its share of the parameters."
    )
    again = redraw(plot_module_shares, csv("modules"))
    drawn = sheets.figure("modules_drawn", lambda: plot_module_shares(modules), caption, again=again)
    return [drawn, sheets.table("modules", modules, "The same in numbers.", folded=True)]
