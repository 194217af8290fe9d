"""Make one training run: train, judge checkpoints, and keep a small part in the repository.

    RUNS/SCALE/TRACK/VARIANT/seedN/
        config.json         as the trainer wrote it
        manifest.json       versions, commit, processor
        metrics.csv.gz      a row per step; lists by their mean, six digits
        test.csv            a row per judged checkpoint and level: the table of `evaluate`
        …                   what the track's `judged_further` keeps
        responses.parquet   the last checkpoint's answers to the test's questions, or to so many of them (Test.kept)

Work whose file exists is not repeated; a run with responses.parquet is finished. Tracks that are whole are packed
(analyses/common/pack_runs.py). If the scale's `launch` sets several
processes, `accelerate launch` starts this module in each of them to train; with `weights_kept`, a finished run leaves
in WORK only the weights of that many checkpoints.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd

import analyses.common.dealt_problems
import analyses.common.puzzles
import analyses.common.sums  # noqa: F401  (all register their tasks)
from analyses.common.experiments import RUNS, WORK, Run, Test
from analyses.common.kept_runs import LAST
from analyses.common.measurements import describe_machine
from analyses.common.read_runs import PLANNED
from analyses.common.script import COMPLAINT, end_with, exit_with
from analyses.common.tables import write_csv, write_parquet
from gradscope import load_policy
from gradscope.errors import DivergedError, InputError, first_line
from gradscope.policy import Policy
from gradscope.runs import leave_launch, scalars, write_text
from gradscope.sampling import Evaluation, Sampler, evaluate, make_sampler
from gradscope.tasks import draw_questions, get_task
from gradscope.trainer import OPTIMIZER, TrainConfig, list_checkpoints, step_of, train

CONFIG, ENDED = "config.json", "ended.txt"
"""Files for the processes of `train_launched`: what to train, and how it ended."""
ALONE = ("--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0")
"""Options of `accelerate launch` that it would guess with a warning; precision comes from the configuration."""
KEPT = ["group", "level", "response", "reward", "correct", "format_ok", "finished", "greedy"]
"""Columns of responses.parquet besides tokens and logprob."""


def make(run: Run) -> Run:
    """Train or resume, judge the newest checkpoints, and keep what figures need."""
    work, kept = WORK / run.place, RUNS / run.place
    several = run.launch.get("processes", 1) > 1
    ended = train_launched(run.config, work, **run.launch) if several else train_here(run.config, work)
    kept.mkdir(parents=True, exist_ok=True)
    write_text(kept / "config.json", (work / "config.json").read_text(encoding="utf-8"))
    write_text(kept / "manifest.json", json.dumps(describe(work) | {"ended": ended}, indent=2) + "\n")
    write_csv(read_metrics(work / "metrics.jsonl"), kept / "metrics.csv.gz", float_format="%.6g")
    tables = []
    for checkpoint in list_checkpoints(work)[-run.test.checkpoints :]:
        result = judge(checkpoint, run.test, engine=run.config.engine, dtype=run.config.precision)
        tables.append(result.table.assign(step=step_of(checkpoint)))
    write_csv(pd.concat(tables, ignore_index=True), kept / "test.csv", float_format="%.6g")
    if run.judged_further is not None:
        importlib.import_module(run.judged_further).judge_further(run, list_checkpoints(work), kept)
    write_parquet(keep_responses(result.responses, run.test.kept), kept / f"{LAST}.parquet")
    if (weights := run.launch.get("weights_kept")) is not None:
        clear(work, weights)
    return run


def clear(work: Path, weights: int) -> None:
    """Remove all but the run's newest checkpoints, and AdamW's moments (twice the weights) of these."""
    checkpoints = list_checkpoints(work)
    for checkpoint in checkpoints[: len(checkpoints) - weights]:
        shutil.rmtree(checkpoint)
    for checkpoint in checkpoints[len(checkpoints) - weights :]:
        (checkpoint / OPTIMIZER).unlink(missing_ok=True)


def train_here(config: TrainConfig, work: Path) -> str:
    """Train or resume, and say how the run ended.

    Divergence is a result: the checkpoints up to there are judged, and manifest.json says how the run ended.
    """
    try:
        train(config, work, resume=True, progress=False)
    except DivergedError as error:
        if not list_checkpoints(work):
            raise
        return first_line(error)
    return PLANNED


def train_launched(config: TrainConfig, work: Path, *, processes: int, sharded: bool, **_about: Any) -> str:
    """Do the same in several processes, each with its own GPU and the whole weights (DDP).

    Raises InputError with a process's first complaint, and if the policy fits a GPU only in shards.
    """
    if sharded:
        raise InputError(f"{config.model} needs shards of its weights on these GPUs, which the trainer does not make")
    with TemporaryDirectory() as folder:
        write_text(Path(folder, CONFIG), json.dumps(asdict(config)))
        called = ["--multi_gpu", "--num_processes", str(processes), *ALONE, "-m", "analyses.common.make_run"]
        command = [sys.executable, "-m", "accelerate.commands.launch", *called, work, folder, os.getpid()]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return Path(folder, ENDED).read_text(encoding="utf-8")
    lines = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit status {done.returncode}"]
    complaint = next((line for line in lines if line.startswith(COMPLAINT)), lines[-1])
    raise InputError(f"{processes} processes under accelerate launch: {complaint.removeprefix(COMPLAINT)}")


def be_launched(work: str, folder: str, parent: str) -> None:
    """Train in one process of `train_launched`; it ends with its parent."""
    end_with(int(parent))
    settings = json.loads(Path(folder, CONFIG).read_text(encoding="utf-8"))
    config = TrainConfig(**{name: tuple(v) if isinstance(v, list) else v for name, v in settings.items()})
    ended = train_here(config, Path(work))
    if os.environ["RANK"] == "0":
        write_text(Path(folder, ENDED), ended)
    leave_launch()


def describe(work: Path) -> dict[str, Any]:
    """Return the trainer's manifest without this machine's paths, and the machine."""
    manifest = json.loads((work / "manifest.json").read_text(encoding="utf-8"))
    del manifest["model"]
    return manifest | describe_machine()


def judge(model: str | Path, test: Test, *, engine: str = "hf", dtype: str | None = None) -> Evaluation:
    """Evaluate the policy on the test's questions, which are the same for every policy.

    engine, dtype: the sampler (hf or vllm), and the policy's precision (None: `load_policy`'s choice).
    """
    policy = load_policy(str(model), dtype=dtype)
    with closing(make_sampler(engine, policy, batch_size=256, progress=False)) as sampler:
        return join({name: ask(policy, part, sampler) for name, part in test.parts().items()})


def ask(policy: Policy, test: Test, sampler: Sampler) -> Evaluation:
    """Evaluate the policy on one set of questions."""
    task = get_task(test.task)
    questions = draw_questions(task, test.questions, seed=0, people=test.people, files=test.data)
    return evaluate(
        policy,
        task,
        questions,
        k=test.samples,
        temperature=test.temperature,
        max_new_tokens=test.max_new_tokens,
        sampler=sampler,
    )


def join(parts: Mapping[str | None, Evaluation]) -> Evaluation:
    """Make benchmarks levels of one evaluation: the row for all questions of each, under its name."""
    if None in parts:
        return parts[None]
    frames = [(part.table[part.table["level"] == "all"], part.scores, part.responses) for part in parts.values()]
    named = [[frame.assign(level=name) for frame in three] for name, three in zip(parts, frames, strict=True)]
    return Evaluation(*(pd.concat(kind, ignore_index=True) for kind in zip(*named, strict=True)))


def keep_responses(responses: pd.DataFrame, questions: int | None) -> pd.DataFrame:
    """Return text, grade, number of tokens and summed log π (nats) of the kept questions' responses."""
    if questions is not None:
        responses = responses[responses["group"] < questions]
    logprobs = responses["old_logprobs"]
    return responses[KEPT].assign(tokens=logprobs.map(len), logprob=logprobs.map(np.sum))


def read_metrics(file: Path) -> pd.DataFrame:
    """Return a row per step of metrics.jsonl; entries per pass become their mean."""
    lines = pd.read_json(file, lines=True).to_dict("records")
    return pd.DataFrame([scalars(line) for line in lines])


if __name__ == "__main__":
    exit_with(lambda: be_launched(*sys.argv[1:]))
