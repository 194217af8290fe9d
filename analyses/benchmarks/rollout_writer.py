"""Measure what `RolloutWriter` adds to a TRL training run, and check that it changes no weight.

    python -m analyses.benchmarks.rollout_writer --steps 100
    python -m analyses.benchmarks.rollout_writer SMOLLM2 --task word-problems-plain --steps 100 --prompts 4 --tokens 48

Trains without and with the writer, from the same weights and seed, and adds a row to the table: seconds of both runs;
for the second, wall and CPU time of the writer's calls in the training thread, CPU time of the writing thread and
process (startup included), and both as shares: calls_share of the run's wall time, cpu_share of all CPU time. same:
whether the final weights are bit-equal.
"""

from __future__ import annotations

import os
import shutil
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import tyro
from transformers import set_seed

from analyses.common.script import exit_with
from gradscope.integrations.trl import RolloutWriter
from gradscope.policy import find_checkpoint
from gradscope.rollouts import read_dump
from gradscope.tasks import get_task


@dataclass(frozen=True)
class Options:
    model: Annotated[str, tyro.conf.Positional] = "embedded"
    task: str = "knights-knaves-compact"
    steps: int = 100
    prompts: int = 8
    """Prompts per optimizer step."""
    responses: int = 8
    """Responses per prompt."""
    tokens: int = 400
    """Maximum tokens per response."""
    temperature: float = 0.7
    text: bool = False
    threads: int = 1
    report_to: str = "none"
    """Where TRL logs, every tenth step: "tensorboard" gets `TokenMonitor`'s histograms, too."""
    work: Path = Path("work/rollout_writer")
    out: Path = Path("figures/cost/data/benchmark_rollout_writer.csv")


@dataclass(frozen=True)
class Trained:
    """Results of a training run with or without a callback."""

    wall: float
    """Seconds."""
    cpu: float
    """Seconds of this process and its finished children."""
    callback: Any
    weights: dict[str, torch.Tensor]
    """Final weights."""


def train(options: Options, folder: Path, make_callback: Callable[[Any], Any] | None = None) -> Trained:
    """Train with TRL; make_callback takes the trainer."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    task = get_task(options.task)
    asked = {question.prompt: question for question in task.questions(200, seed=1)}

    def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        # So that a policy that never earns the task's reward has a gradient, too.
        earned = (task.reward(text, asked[prompt]) for prompt, text in zip(prompts, completions, strict=True))
        return [own + 0.01 * text.count("e") for own, text in zip(earned, completions, strict=True)]

    config = GRPOConfig(
        str(folder),
        max_steps=options.steps,
        per_device_train_batch_size=options.prompts * options.responses,
        num_generations=options.responses,
        max_completion_length=options.tokens,
        temperature=options.temperature,
        save_strategy="no",
        report_to=options.report_to,
        logging_steps=10,
        disable_tqdm=True,
        bf16=False,
        use_cpu=True,
    )
    set_seed(0)
    data = Dataset.from_dict({"prompt": list(asked)})
    trainer = GRPOTrainer(find_checkpoint(options.model), reward, args=config, train_dataset=data)
    callback = None if make_callback is None else make_callback(trainer)
    if callback is not None:
        trainer.add_callback(callback)
    wall, cpu = time.perf_counter(), sum(os.times()[:4])
    trainer.train()
    wall, cpu = time.perf_counter() - wall, sum(os.times()[:4]) - cpu
    weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    return Trained(wall, cpu, callback, weights)


def main(options: Options) -> None:
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    shutil.rmtree(options.work, ignore_errors=True)
    without = train(options, options.work / "without")
    found = train(options, options.work / "with", lambda trainer: RolloutWriter(trainer, text=options.text))
    writer = found.callback
    row = {"model": options.model, "steps": options.steps, "responses": options.prompts * options.responses}
    row |= {"wall_without": without.wall, "cpu_without": without.cpu, "wall": found.wall, "cpu": found.cpu}
    row |= {"calls_wall": writer.seconds, "calls_cpu": writer.cpu_seconds, "beside_cpu": writer.process_seconds}
    row["tokens"] = read_dump(writer.folder).batch.num_tokens
    row["bytes"] = sum(path.stat().st_size for path in writer.folder.iterdir())
    row["calls_share"] = row["calls_wall"] / row["wall"]
    row["cpu_share"] = (row["calls_cpu"] + row["beside_cpu"]) / row["cpu"]
    row["same"] = all(torch.equal(without.weights[name], weight) for name, weight in found.weights.items())
    add_row(row, options.out)


def add_row(row: dict[str, Any], out: Path) -> None:
    """Add a row to the table and print it."""
    table = pd.DataFrame([row])
    if out.is_file():
        table = pd.concat([pd.read_csv(out), table], ignore_index=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    table.round(6).to_csv(out, index=False)
    print(table.to_string(index=False), flush=True)


if __name__ == "__main__":
    exit_with(lambda: main(tyro.cli(Options, description=__doc__)))
