"""Train the policy of scale gpu: a Qwen2 of 19 million parameters that reasons about puzzles of 3 to 7 people.

    python -m analyses.recipes.gpu_policy [--out runs/gpu/policy]

It is trained from scratch, by the recipe of analyses/recipes/certain_policy.py, sized for twenty minutes of one H200
(an estimate: it has not been run there). The command ends after `minutes`; repeated, it resumes, until the policy is in
OUT. It differs from embedded-certain in size, names drawn from the data set's, more people, bfloat16 products, and
noise: stages have more and more wrong verdicts until samples for 3-people puzzles are right `target` of the time, so
that reinforcement learning has something to improve. A fifth of all puzzles, those of the task kk-named-test, never
occur in training. Seed, number of workers and interruptions determine which examples are drawn.
"""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from transformers import PreTrainedTokenizerFast

from analyses.common.puzzles import NAMED_TEST, is_for_test
from analyses.common.script import exit_with
from analyses.recipes.case_analysis import write_response
from analyses.recipes.supervised import (
    EVALUATION_SEED,
    Stage,
    batches,
    build_model,
    build_tokenizer,
    evaluate,
    examples,
    make_optimizer,
    open_log,
    train,
)
from gradscope.errors import InputError
from gradscope.policy import find_device
from gradscope.runs import replacing
from gradscope.tasks.knights_knaves import NAMES

PEOPLE = (3, 4, 5, 6, 7)
CLEAN = 0.8
"""The first stage's share of the tokens; each other stage sees a quarter of the rest."""
NOISES = (0.15, 0.25, 0.35, 0.45)
SAVE_EVERY = 500
"""Steps between saved states."""


@dataclass(frozen=True)
class Options:
    out: Path = Path("runs/gpu/policy")
    """Folder of the policy; beside it, OUT-unfinished holds the state of the training."""
    tokens: int = 200_000_000
    """Response tokens of all stages, if all are needed."""
    hidden: int = 512
    layers: int = 6
    batch: int = 128
    """Examples per optimizer step."""
    longest: int = 512
    """Maximum tokens of a response; longer ones are skipped."""
    target: float = 0.45
    """Noise stops once at most this share of samples for 3-people puzzles is right."""
    questions: int = 500
    """Test puzzles after each stage."""
    minutes: float = 9.0
    """Minutes after which the state is saved and the command ends."""
    workers: int = max(0, len(os.sched_getaffinity(0)) - 1) if hasattr(os, "sched_getaffinity") else 0
    """Processes that write examples; 0: this one."""
    seed: int = 0
    device: str | None = None
    """torch device; none: a GPU if there is one."""


class TimeUp(Exception):
    """The minutes are over; the state is saved."""


class Examples(IterableDataset):
    """A stage's endless batches, from each worker's own random numbers."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, stage: Stage, longest: int, seed: str) -> None:
        self.tokenizer, self.stage, self.longest, self.seed = tokenizer, stage, longest, seed

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        worker = get_worker_info()
        rng = random.Random(f"{self.seed} {0 if worker is None else worker.id}")
        return batches(self.rows(rng), self.stage.batch, rng, pool=8)

    def rows(self, rng: random.Random) -> Iterator[tuple[list[int], int]]:
        """Yield (ids of prompt and response, length of the prompt) endlessly."""
        drawn = {"people": PEOPLE, "names": NAMES, "longest": self.longest}
        return examples(self.tokenizer, self.stage, rng, is_for_test, **drawn)


class Training:
    """Training that can be suspended at any step."""

    def __init__(self, options: Options, tokenizer: PreTrainedTokenizerFast) -> None:
        self.options, self.tokenizer = options, tokenizer
        self.folder = options.out.with_name(options.out.name + "-unfinished")
        self.file = self.folder / "state.pt"
        self.ends = time.monotonic() + 60 * options.minutes
        self.stages = list_stages(options, tokenizer)
        torch.manual_seed(options.seed)
        sizes = {"hidden": options.hidden, "layers": options.layers, "heads": max(2, options.hidden // 64)}
        self.model = build_model(tokenizer, **sizes).to(find_device(options.device))
        self.stage, self.step, self.optimizer = 0, 0, make_optimizer(self.model, self.stages[0])
        self.resumed = self.file.is_file()
        if self.resumed:
            self.load()

    def load(self) -> None:
        """Resume. Raises InputError if the settings were different."""
        state = torch.load(self.file, map_location=self.model.device, weights_only=True)
        if state["settings"] != self.settings:
            raise InputError(
                f"{self.file} was made with {state['settings']}; give the same settings, or remove {self.folder}"
            )
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.stage, self.step = state["stage"], state["step"]

    def save(self) -> None:
        """Write the training state atomically."""
        state = {"settings": self.settings, "stage": self.stage, "step": self.step}
        state |= {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        with replacing(self.file) as beside:
            torch.save(state, beside)

    @property
    def settings(self) -> dict[str, Any]:
        """Settings that determine the policy."""
        names = ("tokens", "hidden", "layers", "batch", "longest", "target", "questions", "seed")
        return {name: getattr(self.options, name) for name in names}

    def finish_stage(self, log: Callable[..., None]) -> None:
        """Train to the stage's end. Raises TimeUp if the minutes end first."""
        stage = self.stages[self.stage]
        rows = Examples(self.tokenizer, stage, self.options.longest, f"{self.options.seed} {stage.name} {self.step}")
        workers = {"num_workers": self.options.workers, "prefetch_factor": 8} if self.options.workers else {}
        stream = iter(DataLoader(rows, batch_size=None, pin_memory=self.model.device.type == "cuda", **workers))
        train(self.model, stage, stream, log, optimizer=self.optimizer, done=self.step, on_step=self.after_step)
        self.save()

    def after_step(self, step: int) -> None:
        self.step = step
        over = time.monotonic() > self.ends and step < self.stages[self.stage].steps
        if over or step % SAVE_EVERY == 0:
            self.save()
        if over:
            raise TimeUp

    def go_on(self) -> None:
        """Go to the next stage."""
        self.stage, self.step = self.stage + 1, 0
        self.optimizer = make_optimizer(self.model, self.stages[self.stage])
        self.save()

    def run(self, log: Callable[..., None]) -> None:
        """Train stage by stage, judging each by samples, and add noise until it is enough. Raises TimeUp."""
        questions = NAMED_TEST.questions(self.options.questions, seed=EVALUATION_SEED, people=PEOPLE)
        while True:
            self.finish_stage(log)
            results = evaluate(self.model, self.tokenizer, questions, batch=500, longest=self.options.longest)
            log(event=f"after {self.stages[self.stage].name}", **results)
            enough = self.stage > 0 and results["accuracy"][PEOPLE[0]] <= self.options.target
            if enough or self.stage + 1 == len(self.stages):
                return
            if time.monotonic() > self.ends:
                raise TimeUp
            self.go_on()


def list_stages(options: Options, tokenizer: PreTrainedTokenizerFast) -> list[Stage]:
    """Return the stages, clean traces first, then noisy ones in random order; steps follow from shares of tokens."""
    clean = Stage("clean", 1, options.batch, (1e-3, 1e-5))
    tokens = options.batch * mean_length(tokenizer, clean, options.longest)
    steps = max(1, round(CLEAN * options.tokens / tokens))
    short = max(1, round((1 - CLEAN) / len(NOISES) * options.tokens / tokens))
    noisy = [partial(write_response, noise=noise, check=0.3, free=True) for noise in NOISES]
    return [
        replace(clean, steps=steps),
        *(
            Stage(f"noise {noise}", short, options.batch, (4e-4, 4e-5), write)
            for noise, write in zip(NOISES, noisy, strict=True)
        ),
    ]


def mean_length(tokenizer: PreTrainedTokenizerFast, stage: Stage, longest: int, drawn: int = 100) -> float:
    """Return the mean number of tokens of a response, over examples drawn with a seed of their own."""
    rows = Examples(tokenizer, stage, longest, "").rows(random.Random(0))
    return sum(len(ids) - prompt for ids, prompt in (next(rows) for _ in range(drawn))) / drawn


def write_policy(training: Training) -> None:
    """Write the policy in bfloat16 with its tokenizer and log, atomically."""
    whole = training.folder / "policy"
    training.model.to(torch.bfloat16).save_pretrained(whole)
    training.tokenizer.save_pretrained(whole)
    shutil.copy(training.folder / "training.jsonl", whole / "training.jsonl")
    os.replace(whole, training.options.out)
    shutil.rmtree(training.folder)


def main(options: Options) -> None:
    """Train until the policy is finished or the minutes are over. Raises InputError if settings have changed."""
    if options.out.exists():
        print(f"finished: {options.out}")
        return
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the workers are forks
    training = Training(options, build_tokenizer(NAMES))
    log = open_log(training.folder / "training.jsonl", append=training.resumed)
    steps = {stage.name: stage.steps for stage in training.stages}
    device = str(training.model.device)
    log(event="start", parameters=training.model.num_parameters(), device=device, steps=steps, **training.settings)
    try:
        training.run(log)
    except TimeUp:
        stage = training.stages[training.stage]
        print(f"{stage.name}, step {training.step} of {stage.steps}; start the same command again to go on")
        return
    write_policy(training)
    print(f"finished: {options.out}")


if __name__ == "__main__":
    exit_with(lambda: main(tyro.cli(Options, description=__doc__)))
