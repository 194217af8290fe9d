"""Table 6: seconds per training step, split into sampling, training and others, with and without Lopti.

    python -m analyses.paper.table6 [--out figures] [--scale cpu]

Writes table6.csv and .md. Seconds are medians over a run's steps, then over runs; ratios are to GRPO at the same seed,
geometric means over seeds with 95 % t intervals and Holm's correction within a row.

Differs from the paper: the policy. At scale cpu these are wall seconds of one thread on a shared machine, two runs side
by side, and runs of one seed were not all made at the same time, so every ratio of seconds includes the machine's load
and, at scale certain, which of two machines made a run. The last row, training relative to the same run's sampling,
which the methods do not change, is affected less. The paper's sampling and training of 7B seem swapped: otherwise
Lopti's second pass would cost sampling time. It gives no numbers for Reweight, which it says costs milliseconds.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import tyro

from analyses.common.contrasts import compare
from analyses.common.read_runs import pages, read_metrics
from analyses.common.script import Options, exit_with
from analyses.common.tables import write_table

PROCEDURES = {"sampling": "seconds_sampling", "training": "seconds_training", "others": "seconds_other"}
RELATIVE = "training / sampling"
PAPER = {
    "paper 3B": {"grpo": (25.4, 17.6, 2.4, 45.4), "lopti": (27.8, 35.3, 2.8, 65.9)},
    "paper 7B": {"grpo": (61.4, 68.5, 10.3, 140.2), "lopti": (116.8, 69.3, 10.2, 196.3)},
}
"""The paper's Table 6, without and with Lopti: seconds for sampling, training, others, total."""


def table(metrics: pd.DataFrame, variants: list[str]) -> pd.DataFrame:
    """Return a row per procedure, the total, training over sampling, and variant with runs.

    Columns: procedure, variant, label, seeds, seconds, ratio (to GRPO), ratio_lower, ratio_upper, p_holm, the paper's.
    """
    runs = per_run(metrics)
    rows = []
    for place, procedure in enumerate([*PROCEDURES, "total", RELATIVE]):
        logs = runs.assign(**{procedure: np.log(runs[procedure])})
        compared = compare(logs, procedure, [(variant, "grpo") for variant in variants if variant != "grpo"])
        compared = compared.set_index("variant").reindex(variants)
        for (variant, label), own in runs.groupby(["variant", "label"], sort=False):
            found = compared.loc[variant]
            row = {"procedure": procedure, "variant": variant, "label": label, "seeds": len(own)}
            row |= {"seconds": own[procedure].median(), "ratio": np.exp(found["difference"])}
            row |= {"ratio_lower": np.exp(found["lower"]), "ratio_upper": np.exp(found["upper"])}
            paper = {name: _paper(times.get(variant))[place] for name, times in PAPER.items()}
            rows.append(row | {"p_holm": found["p_holm"]} | paper)
    return pd.DataFrame(rows)


def per_run(metrics: pd.DataFrame) -> pd.DataFrame:
    """Return a row per run: variant, label, seed, median seconds by procedure and in all, training / sampling."""
    times = metrics.rename(columns={column: procedure for procedure, column in PROCEDURES.items()})
    times = times.assign(total=times[list(PROCEDURES)].sum(axis=1))
    runs = times.groupby(["variant", "label", "seed"], sort=False)[[*PROCEDURES, "total"]].median().reset_index()
    return runs.assign(**{RELATIVE: runs["training"] / runs["sampling"]})


def lay_out(found: pd.DataFrame) -> pd.DataFrame:
    """Lay out the table as in the paper: a row per procedure, a column per method; ours first, with ratios."""
    rows = []
    for procedure, own in found.groupby("procedure", sort=False):
        row = {"seconds per step": procedure}
        for cell in own.to_dict("records"):
            row[f"{cell['label']} (seeds: {cell['seeds']})"] = f"{cell['seconds']:.2f}" + _ratio(cell)
        for paper in PAPER:
            known = own.dropna(subset=paper).set_index("variant")
            for variant, words in (("grpo", "without"), ("lopti", "with Lopti")):
                row[f"{paper}, {words}"] = _seconds(known[paper].get(variant), procedure)
        rows.append(row)
    return pd.DataFrame(rows)


def _seconds(value: float | None, procedure: str) -> str:
    return "" if value is None else f"{value:.{2 if procedure == RELATIVE else 1}f}"


def _paper(times: tuple[float, ...] | None) -> tuple[float, ...]:
    return (np.nan,) * 5 if times is None else (*times, times[1] / times[0])


def _ratio(cell: dict[str, Any]) -> str:
    if np.isnan(cell["ratio"]):
        return ""
    bounds = f" [{cell['ratio_lower']:.2f}, {cell['ratio_upper']:.2f}]" if not np.isnan(cell["ratio_lower"]) else ""
    return f" (× {cell['ratio']:.2f}{bounds})"


def main(options: Options) -> None:
    for name, track, variants in pages("table6", options.scale):
        found = table(read_metrics(variants, scale=options.scale, track=track), variants)
        shown = lay_out(found)
        write_table(found, options.at(f"{name}.md"), shown=shown)
        print(shown.to_string(index=False))


if __name__ == "__main__":
    exit_with(lambda: main(tyro.cli(Options, description=__doc__)))
