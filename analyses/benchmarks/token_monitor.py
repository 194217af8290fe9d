"""Measure what `TokenMonitor` adds to a TRL training run, and check that it changes no weight.

    python -m analyses.benchmarks.token_monitor --steps 100
    python -m analyses.benchmarks.token_monitor SMOLLM2 --task word-problems-plain --steps 100 --prompts 2 --tokens 32

Trains without and with the monitor, from the same weights and seed, and adds a row to the table: seconds of both runs
(`--alone`: only of the second); for the second, wall and CPU time of the monitor's calls in the training thread, and
the cost of Σπ² in TRL's head. For the latter, every call of the head is repeated twice on the same tensors, with and
without Σπ² in alternating order; head_cpu is the difference, and these calls count nowhere else. calls_share is
relative to the run's wall time; cpu_share is the CPU time of calls and head over the run's. same: whether the final
weights are bit-equal.
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
    out: Path = Path("figures/cost/data/benchmark_token_monitor.csv")
    alone: bool = False
    """Do not train without the monitor."""


@contextmanager
def timed_head(seconds: dict[str, float]) -> Iterator[None]:
    """Sum the cost of Σπ² in TRL's head, `squares`, and of measuring it, `replay` and `replay_wall`."""
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
