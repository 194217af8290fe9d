"""Take the branches whose gains analyses/measure/predictions.py predicts, and judge their ends.

From each origin, ten steps for each replicate and method; then 200 test puzzles × 4 sampled responses, the same puzzles
for all. Requires the predictions for the same weights. Writes

    branches.csv        a row per origin, replicate and method: mean reward and accuracy
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pandas as pd
from tqdm import tqdm

from analyses.common.branches import LENGTH, REPLICATES, VARIANTS, Origin, list_origins, take_branch
from analyses.common.experiments import Test
from analyses.common.make_run import judge
from analyses.common.measurements import keep, part, read_table
from gradscope.errors import InputError

TEST = Test(
    "kk-compact-test", temperature=0.7, max_new_tokens=400, checkpoints=1, questions=200, samples=4, people=(2, 3, 4, 5)
)


def measure(out: Path, *, scale: str = "cpu") -> None:
    """Take and judge all branches of a scale. Raises InputError without predictions for the same weights."""
    origins = list(list_origins(scale))
    predicted = read_table("predictions", "predictions.csv", scale=scale)
    known = predicted.groupby(["seed", "step"])["weights"].first().astype(str)
    if changed := [origin for origin in origins if known.get((origin.seed, origin.step)) != origin.weights]:
        raise InputError(f"{changed[0].folder} has other weights than predictions were made for; predict again first")
    frames = []
    with tqdm(total=len(origins) * REPLICATES * len(VARIANTS), desc=f"branches, {scale}") as bar:
        for origin in origins:
            for replicate in range(REPLICATES):
                for variant in VARIANTS:
                    name = f"{origin.seed}-{origin.step}-{origin.weights}-{replicate}-{variant}"
                    frames.append(part(out, name, partial(take, origin, variant, replicate)))
                    bar.update()
    keep(out, {"branches.csv": pd.concat(frames)}, questions=TEST.questions, samples=TEST.samples, length=LENGTH)


def take(origin: Origin, variant: str, replicate: int) -> pd.DataFrame:
    """Return one row."""
    responses = judge(take_branch(origin, variant, replicate, LENGTH), TEST).responses
    sampled = responses[~responses["greedy"]]
    row = {"seed": origin.seed, "step": origin.step, "replicate": replicate, "variant": variant}
    return pd.DataFrame([row | {"reward": sampled["reward"].mean(), "accuracy": sampled["correct"].mean()}])
