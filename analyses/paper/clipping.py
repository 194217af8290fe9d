"""How often a step's gradient is clipped, and how far: methods whose norms differ do not take the same steps.

    python -m analyses.paper.clipping [--out figures]

clipping.csv has a row per setting (scale and track) and method: seeds, the mean norm before clipping, the runs'
threshold, and the share of steps whose norm exceeds it, with a 95 % t interval over seeds, least and most. A step's
norm is the mean over its optimizer steps; each of Lopti's contains only part of the tokens.
"""

from __future__ import annotations

import pandas as pd
import tyro

from analyses.common.contrasts import summarize
from analyses.common.experiments import configure, needs
from analyses.common.read_runs import has_runs, read_metrics
from analyses.common.script import Output as Options, exit_with
from analyses.common.tables import write_csv

SCALES = ("cpu", "certain", "words")


def table() -> pd.DataFrame:
    """Return a row per setting and method."""
    frames = []
    for scale in SCALES:
        for track in dict.fromkeys(track for track, _ in needs("clipping", scale)):
            variants = [variant for place, variant in needs("clipping", scale) if place == track]
            if not has_runs(scale, track):
                continue
            threshold = configure(scale, track, "grpo").max_grad_norm
            metrics = read_metrics(variants, scale=scale, track=track)
            metrics["clipped"] = metrics["grad_norm"] > threshold
            runs = metrics.groupby(["variant", "seed"], sort=False)[["grad_norm", "clipped"]].mean().reset_index()
            keys = {"scale": scale, "track": track, "max_grad_norm": threshold}
            norms = summarize(runs, "grad_norm", ["variant"]).rename(columns={"mean": "grad_norm"})
            clipped = summarize(runs, "clipped", ["variant"])
            ends = runs.groupby("variant", sort=False)["clipped"].agg(least="min", most="max").reset_index(drop=True)
            clipped = clipped.rename(columns={"mean": "clipped"}).join(ends)
            frames.append(clipped.assign(grad_norm=norms["grad_norm"], **keys))
    return pd.concat(frames, ignore_index=True)


def main(options: Options) -> None:
    found = table()
    write_csv(found, options.at("clipping.csv"))
    print(found.to_string(index=False, float_format="{:.3f}".format))


if __name__ == "__main__":
    exit_with(lambda: main(tyro.cli(Options, description=__doc__)))
