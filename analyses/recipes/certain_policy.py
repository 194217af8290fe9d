"""Train the policy `embedded-certain`: a tiny Qwen2 that reasons about Knights & Knaves, often wrongly.

    OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE python -m analyses.recipes.certain_policy

It is trained from scratch (analyses/recipes/supervised.py), in about a quarter of an hour on one free core, plus six
minutes for the evaluations. Its chain of thought (analyses/recipes/case_analysis.py) has one wording, so that nine of
ten tokens are nearly certain, unlike those of the paper's policies. The last stage corrupts verdicts, omits most checks
and proceeds in random order, so that reinforcement learning has noise to unlearn.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import tyro
from transformers import Qwen2Config

from analyses.common.script import exit_with
from analyses.recipes import supervised
from analyses.recipes.case_analysis import write_response
from analyses.recipes.supervised import JUDGING, Stage, build_tokenizer, train_policy

NOISE = partial(write_response, noise=0.35, check=0.3, free=True)
STAGES = (*JUDGING, Stage("noise", steps=1000, batch=10, lr=(8e-4, 5e-5), write=NOISE))


@dataclass(frozen=True)
class Options(supervised.Options):
    out: Path = Path("gradscope/embedded/certain")
    log: Path = Path("analyses/recipes/logs/certain_policy.jsonl")


if __name__ == "__main__":
    exit_with(lambda: train_policy(tyro.cli(Options, description=__doc__), STAGES, build_tokenizer(), Qwen2Config))
