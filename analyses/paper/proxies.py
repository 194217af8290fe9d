"""Cheap proxies: how well does each stand for the exact norm of a token's gradient, on two architectures?

    python -m analyses.paper.proxies [--out figures]

Drawn from the measurement `proxies` (analyses/measure/proxies.py) for the norm over all parameters, raw and in AdamW's
metric; proxies.csv also has the norms at every layer. The paper has no such figure.
"""

from __future__ import annotations

import pandas as pd
import tyro

from analyses.common.measurements import read_table
from analyses.common.places import save_picture
from analyses.common.script import Options, exit_with
from analyses.common.tables import write_csv
from analyses.parts.proxies import plot_proxies


def table(options: Options) -> pd.DataFrame:
    """Return a row per policy, norm and proxy."""
    return read_table("proxies", "proxies.csv", scale=options.scale)


def main(options: Options) -> None:
    judged = table(options)
    for policy, own in judged.groupby("policy", sort=False):
        name = str(policy).lower().replace("-", "")
        save_picture(plot_proxies(own, parameters=f"all parameters, {policy}"), options.at(f"proxies_{name}.png"))
    write_csv(judged, options.at("proxies.csv"), float_format="%.4g")
    shown = judged[judged["quantity"].str.startswith("param")]
    print(shown.to_string(index=False, float_format="{:.3f}".format))


if __name__ == "__main__":
    exit_with(lambda: main(tyro.cli(Options, description=__doc__)))
