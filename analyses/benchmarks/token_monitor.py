"""What `TokenMonitor` costs a training with TRL, and that it changes no weight.

    python -m analyses.benchmarks.token_monitor --steps 100
    python -m analyses.benchmarks.token_monitor SMOLLM2 --task word-problems-plain --steps 100 --prompts 2 --tokens 32

Trains without the monitor and with it, from the same weights and seed, and adds a row to the table: seconds of both
runs (`--alone`: of the second only); of the second, wall and CPU time inside the monitor's calls in the training
thread, and what Σπ² adds to TRL's head: every call of the head in training is made twice more on the same tensors, with
Σπ² and without, one after the other in turns, and head_cpu is the difference; these calls are in no other number.
calls_share: of the run's wall time; cpu_share: the CPU time of calls and head over that of the run. same: whether all
weights ended bit-equal.
"""

from __future__ import annotations

import shutil
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro

from analyses.benchmarks.rollout_writer import Options, add_row, train
from analyses.common.script import exit_with
from gradscope.integrations.trl import TokenMonitor

SQUARES = "log_sum_sq_probs"


@dataclass(frozen=True)
class MonitorOptions(Options):
    work: Path = Path("work/token_monitor")
    out: Path = Path("figures/benchmark_token_monitor.csv")
    alone: bool = False
    """Do not train without the monitor."""


@contextmanager
def timed_head(seconds: dict[str, float]) -> Iterator[None]:
    """Add up what Σπ² costs in TRL's head, `squares`, and what finding that out costs, `replay` and `replay_wall`."""
    from trl.trainer import utils

    own = utils._ChunkedLogProbFunction
    seconds |= dict.fromkeys(("squares", "replay", "replay_wall"), 0.0)
    turns = [1, -1]

    class Timed:
        @staticmethod
        @torch.no_grad()
        def replay(args: tuple[Any, ...]) -> None:
            wall, cpu = time.perf_counter(), time.thread_time()
            turns.reverse()
            for sign in turns:
                started = time.thread_time()
                own.apply(*args[:-1], tuple(name for name in args[-1] if sign > 0 or name != SQUARES))
                seconds["squares"] += sign * (time.thread_time() - started)
            seconds["replay"] += time.thread_time() - cpu
            seconds["replay_wall"] += time.perf_counter() - wall

        @staticmethod
        def apply(*args: Any) -> Any:
            if SQUARES in args[-1]:
                Timed.replay(args)
            return own.apply(*args)

    utils._ChunkedLogProbFunction = Timed
    try:
        yield
    finally:
        utils._ChunkedLogProbFunction = own


def main(options: MonitorOptions) -> None:
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    shutil.rmtree(options.work, ignore_errors=True)
    row = {"model": options.model, "steps": options.steps, "responses": options.prompts * options.responses}
    without = None if options.alone else train(options, options.work / "without")
    head: dict[str, float] = {}
    with timed_head(head):
        found = train(options, options.work / "with", TokenMonitor)
    monitor, wall, cpu = found.callback, found.wall - head["replay_wall"], found.cpu - head["replay"]
    if without is not None:
        row |= {"wall_without": without.wall, "cpu_without": without.cpu}
        row["same"] = all(torch.equal(without.weights[name], weight) for name, weight in found.weights.items())
    row |= {"wall": wall, "cpu": cpu, "calls_wall": monitor.seconds, "calls_cpu": monitor.cpu_seconds}
    row |= {"head_cpu": head["squares"], "calls_share": monitor.seconds / wall}
    row["cpu_share"] = (monitor.cpu_seconds + head["squares"]) / cpu
    add_row(row, options.out)


if __name__ == "__main__":
    exit_with(lambda: main(tyro.cli(MonitorOptions, description=__doc__)))
