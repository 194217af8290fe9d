"""Judge the untrained policy on the test at many temperatures, for analyses/paper/sharpening.py.

    python -m analyses.common.measurements untrained [--scale cpu]

Writes untrained.csv, a row per temperature and level: temperature, level, questions, samples (per question), entropy
(mean −log π of sampled tokens at that temperature, in nats), sampled and greedy accuracy. The test is the track
"puzzles"'s with more samples: one policy, judged once, should add little noise of its own.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
from tqdm import tqdm

from analyses.common.experiments import find_run
from analyses.common.make_run import judge
from analyses.common.measurements import keep
from analyses.common.read_runs import UNTRAINED
from gradscope.sampling import Evaluation

TEMPERATURES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.2, 1.4)
"""They exceed the training temperature of .7, since a trained policy may be less certain than the untrained one."""
SAMPLES = 4


def measure(out: Path, *, scale: str = "cpu") -> None:
    """Judge the policy at each temperature; writes out/untrained.csv."""
    run = find_run(scale, "puzzles")
    frames = []
    for temperature in tqdm(TEMPERATURES, "temperatures"):
        result = judge(run.config.model, replace(run.test, temperature=temperature, samples=SAMPLES))
        frames.append(tabulate(result).assign(temperature=temperature, samples=SAMPLES))
    table = pd.concat(frames, ignore_index=True)
    table = table[["temperature", "level", "questions", "samples", "entropy", "sampled", "greedy"]]
    keep(out, {UNTRAINED.name: table})


def tabulate(result: Evaluation) -> pd.DataFrame:
    """Return a row per level and one for "all": questions, entropy of the samples, sampled and greedy accuracy."""
    table = result.table.rename(columns={f"avg@{SAMPLES}": "sampled", "greedy_accuracy": "greedy"})
    sampled = result.responses[~result.responses["greedy"]]
    own = {str(level): rows for level, rows in sampled.groupby("level")} | {"all": sampled}
    # E[−log π] of sampled tokens is the entropy, averaged over the tokens that the policy writes.
    entropy = {level: -float(np.concatenate(rows["old_logprobs"].to_list()).mean()) for level, rows in own.items()}
    return table[["level", "questions", "sampled", "greedy"]].assign(entropy=table["level"].map(entropy))
