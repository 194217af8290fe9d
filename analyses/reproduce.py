"""Make the runs that the paper's figures are drawn from; `make figures` then draws them.

    python -m analyses.reproduce --scale cpu|certain|words|gpu|paper [--only fig4 ...] [--jobs N] [--dry-run]

analyses/runs.toml lists the runs. Each is a one-threaded process, N side by side, or several processes started by
`accelerate launch` if the scale's `launch` says so (paper: four GPUs). A run's data for the figures go to
analyses/runs, the rest stays below runs/. The command can be stopped and repeated: finished runs are skipped, all
others, including failed ones, resume from their newest checkpoint. The repository holds the runs of scale certain and
those made of scale cpu; to remake them, and draw figures from your own, set GRADSCOPE_RUNS to another folder for both
commands.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial

import tyro
from tqdm import tqdm

from analyses.common import dry_run
from analyses.common.experiments import Run, drawn_as, launch_of, list_runs, needs
from analyses.common.kept_runs import is_finished
from analyses.common.make_run import make
from analyses.common.measurements import Measurement, is_measured, list_measurements, make_measurement
from analyses.common.script import end_with, exit_with
from gradscope.errors import DivergedError, InputError, SyncError, first_line
from gradscope.runs import worker_context


@dataclass(frozen=True)
class Options:
    scale: str = "cpu"
    """A scale of analyses/runs.toml."""
    only: tuple[str, ...] = ()
    """Figures or tables, such as fig4, whose runs to make; none: all runs."""
    jobs: int | None = None
    """Runs side by side; none: one per core, or one at a time if each takes several processes."""
    dry_run: bool = False
    """Make nothing; list runs, and check settings, data, reference answers and batches (analyses/common/dry_run.py)."""


def count_jobs(options: Options) -> int:
    """Return how many runs go side by side."""
    if options.jobs is not None:
        return options.jobs
    if launch_of(options.scale).get("processes", 1) > 1:
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def choose(options: Options) -> list[Run]:
    """Return the requested runs in the order in which they are made; none if a figure needs only measurements."""
    runs = list_runs(options.scale)
    if options.only:
        wanted = {pair for figure in options.only for pair in needs(figure, options.scale)}
        runs = [run for run in runs if (run.track, run.variant) in wanted]
    return runs


def choose_measurements(options: Options) -> list[Measurement]:
    """Return the requested, missing measurements whose runs and earlier measurements are finished."""
    wanted = set(map(drawn_as, options.only))
    known = list_measurements(options.scale)
    unfinished = {f"{run.track}/{run.variant}" for run in list_runs(options.scale) if not is_finished(run)}
    unfinished |= {measurement.name for measurement in known if not is_measured(measurement.name, options.scale)}
    return [
        measurement
        for measurement in known
        if not is_measured(measurement.name, options.scale)
        and (not wanted or wanted & set(measurement.figures))
        and not unfinished & set(measurement.after)
    ]


def make_all(todo: Mapping[str, Callable[[], object]], jobs: int, unit: str) -> list[str]:
    """Make all items side by side; returns a line for each failure, which does not stop the others."""
    failed = []
    with ProcessPoolExecutor(jobs, worker_context(), _begin, (os.getpid(),)) as pool:
        names = {pool.submit(do): name for name, do in todo.items()}
        try:
            for job in tqdm(as_completed(names), f"{unit}s", total=len(names), unit=unit):
                if complaint := _complaint(job):
                    failed.append(f"{names[job]}: {complaint}")
                tqdm.write(failed[-1] if complaint else f"{names[job]}: finished")
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return failed


def _complaint(job: Future) -> str | None:
    """Return the line of an error caused by the machine or the input; other errors are bugs and propagate."""
    try:
        job.result()
    except (InputError, DivergedError, SyncError, OSError) as error:
        return first_line(error)
    except BrokenProcessPool:
        return "a process was killed, maybe for want of memory: start again, with fewer --jobs"
    return None


def _begin(parent: int) -> None:
    """Set up a worker: one thread, no progress bars, and it ends with its parent."""
    import torch
    from transformers.utils import logging

    torch.set_num_threads(1)
    logging.disable_progress_bar()
    end_with(parent)


def main(options: Options) -> int:
    if options.jobs is not None and options.jobs < 1:
        raise InputError(f"--jobs is {options.jobs}; give at least 1")
    runs = choose(options)
    left = [run for run in runs if not is_finished(run)]
    print(f"scale {options.scale}: {len(runs)} runs, {len(runs) - len(left)} finished", flush=True)
    if options.dry_run:
        for run in runs:
            print(f"  {run.place}" + ("" if run in left else ", finished"))
        if runs:
            dry_run.main(dry_run.Options(options.scale, options.only))
        return 0
    jobs = count_jobs(options)
    failed = make_all({str(run.place): partial(make, run) for run in left}, jobs, "run")
    measurements = choose_measurements(options)
    todo = {found.name: partial(make_measurement, found, options.scale) for found in measurements}
    failed += make_all(todo, jobs, "measurement")
    for line in failed:
        print(line, file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    exit_with(lambda: main(tyro.cli(Options, description=__doc__)))
