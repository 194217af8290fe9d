"""Judge the pretrained policy on its runs' validation problems before training.

    python -m analyses.common.measurements words_start --scale words

Writes start.csv: a row per level and one for all, with sampled and greedy accuracy and the other columns of test.csv.
"""

from __future__ import annotations

from pathlib import Path

from analyses.common.experiments import find_run
from analyses.common.make_run import judge
from analyses.common.measurements import keep


def measure(out: Path, *, track: str = "words-low") -> None:
    """Judge the policy with which the track's runs begin, as their checkpoints are judged."""
    run = find_run("words", track)
    table = judge(run.config.model, run.test).table
    names = {f"avg@{run.test.samples}": "sampled", "greedy_accuracy": "greedy"}
    keep(out, {"start.csv": table.rename(columns=names)})
