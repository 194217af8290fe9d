"""Judge the pretrained policy on its runs' validation problems before training.

    python -m analyses.common.measurements words_start --scale words

Writes start.csv: a row per level and one for all, with sampled and greedy accuracy and the other columns of test.csv.
"""

from __future__ import annotations

from pathlib import Path

from analyses.common.experiments import list_runs
from analyses.common.make_run import judge
from analyses.common.measurements import keep


def measure(out: Path) -> None:
    """Judge the policy as the runs' checkpoints are."""
    run = next(run for run in list_runs("words") if run.track == "words-low")
    table = judge(run.config.model, run.test).table
    names = {f"avg@{run.test.samples}": "sampled", "greedy_accuracy": "greedy"}
    keep(out, {"start.csv": table.rename(columns=names)})
