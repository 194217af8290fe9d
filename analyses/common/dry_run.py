"""Check whether a scale's runs could start: configurations, data, batches and prompts. Nothing is trained.

    python -m analyses.common.dry_run [--scale paper] [--only fig4 ...] [--out unverified.csv]

Each data set is read once: its files, its questions, and whether its reference answers earn the full reward. Then each
track: its variants' settings, the first batch, steps, and, if the policy's tokenizer is here, prompts as tokens.
Missing data are named with where to put them and are no failure; invalid data are (exit status 2). Unlike a run it uses
no weights, no model hub and no GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import tyro

import analyses.common.dealt_problems
import analyses.common.puzzles
import analyses.common.sums  # noqa: F401  (all register their tasks)
from analyses.common.dry_run_data import (
    Check,
    DataSet,
    State,
    check_answers,
    check_files,
    check_questions,
    lengths,
)
from analyses.common.experiments import Run, list_runs, needs, of_the_paper
from analyses.common.script import exit_with
from gradscope.errors import InputError
from gradscope.policy import EMBEDDED, Policy, outline_policy
from gradscope.sampling import check_prompts
from gradscope.tasks import Question, draw_questions, get_task
from gradscope.trainer import Questions, TrainConfig

ABOUT = 0.05
"""Largest relative difference between approximately equal numbers of steps."""


@dataclass(frozen=True)
class DryRun:
    """Result of `dry_run`."""

    checks: list[Check]
    unverified: pd.DataFrame
    """A row per unverified reference answer: file, row, answer, reason."""

    @property
    def table(self) -> pd.DataFrame:
        """A row per check: subject, what, state, detail."""
        return pd.DataFrame([vars(check) for check in self.checks])

    def named(self, state: State) -> list[Check]:
        """Return the checks with this state."""
        return [check for check in self.checks if check.state == state]

    def __str__(self) -> str:
        width = [max(len(getattr(check, name)) for check in self.checks) for name in ("subject", "what")]
        lines = [f"{c.subject:{width[0]}}  {c.what:{width[1]}}  {c.state:6}  {c.detail}" for c in self.checks]
        counts = ", ".join(f"{len(self.named(state))} {state}" for state in ("ok", "absent", "fails"))
        return "\n".join((*lines, f"{len(self.checks)} checks: {counts}"))


def dry_run(scale: str, *, only: Sequence[str] = (), progress: bool = True) -> DryRun:
    """Check everything that a scale's runs need, or those of some figures.

    Raises InputError for an unknown scale or figure, and for invalid settings.
    """
    runs = list_runs(scale)
    if only:
        wanted = {pair for figure in only for pair in needs(figure, scale)}
        runs = [run for run in runs if (run.track, run.variant) in wanted]
    checks, tables, read = [], [], {}
    for dataset in dict.fromkeys(dataset for run in runs for dataset in datasets_of(run)):
        checks.append(files := check_files(dataset))
        if files.state != "ok":
            continue
        questions_there, read[dataset] = check_questions(dataset)
        checks.append(questions_there)
        if questions_there.state == "ok":
            try:
                answers, table = check_answers(dataset, len(read[dataset]), progress=progress)
            except InputError as error:
                answers, table = Check(dataset.name, "answers", "fails", str(error)), pd.DataFrame()
            checks.append(answers)
            tables.append(table)
    for track in dict.fromkeys(run.track for run in runs):
        checks += check_track([run for run in runs if run.track == track], read)
    return DryRun(checks, pd.concat(tables, ignore_index=True) if tables else pd.DataFrame())


def datasets_of(run: Run) -> list[DataSet]:
    """Return the data files that a run trains on and is tested with."""
    parts = [(run.config.task, run.config.data)]
    parts += [(part.task, part.data) for part in run.test.parts().values()]
    return [DataSet(task, tuple(data)) for task, data in parts if data]


def check_track(runs: Sequence[Run], read: dict[DataSet, list[Question]]) -> Iterator[Check]:
    """Check a track's runs, its batches and its prompts."""
    first, track = runs[0], runs[0].track
    variants = list({run.variant: run.config for run in runs}.items())
    seeds = sorted({run.seed for run in runs})
    yield Check(track, "runs", "ok", f"{len(runs)}: {len(variants)} variants, seeds {', '.join(map(str, seeds))}")
    training = DataSet(first.config.task, first.config.data)
    if first.config.data and not read.get(training):
        yield Check(track, "batches", "absent", f"no questions: {training.name}")
        questions = []
    else:
        batch, questions = check_batch(first, variants)
        yield batch
    asked = questions + [question for part in first.test.parts().values() for question in _test_questions(part, read)]
    yield check_prompts_of(first, asked)


def _test_questions(part: Any, read: dict[DataSet, list[Question]]) -> list[Question]:
    if part.data:
        return read.get(DataSet(part.task, part.data), [])
    return draw_questions(get_task(part.task), min(part.questions, 64), seed=0, people=part.people)


def check_batch(run: Run, variants: Sequence[tuple[str, TrainConfig]]) -> tuple[Check, list[Question]]:
    """Check the first batch, optimizer steps per batch by variant, and the run's steps against the paper's."""
    config, track = run.config, run.track
    try:
        source = Questions(get_task(config.task), config)
        batch, steps = source.of_step(0), source.steps
    except InputError as error:
        return Check(track, "batches", "fails", str(error)), []
    questions = source.stored or batch
    updates = {name: _optimizer_steps(settings) for name, settings in variants}
    usual = min(updates.values())
    others = {
        count: [name for name in updates if updates[name] == count] for count in sorted({*updates.values()} - {usual})
    }
    detail = f"{len(batch)} questions × {config.group_size} = {config.num_responses} responses, "
    detail += f"{config.mini_batch_size} to an optimizer step: {usual} a batch"
    detail += "".join(f", {count} with {', '.join(names)}" for count, names in others.items())
    detail += f"; {steps} batches in all"
    if source.stored is not None:
        detail += f", {len(source.stored) / config.questions_per_step:.1f} an epoch"
    paper = of_the_paper(run.scale, track)
    agrees = abs(steps - paper.get("steps", steps)) <= ABOUT * steps
    agrees &= usual == paper.get("optimizer_steps", usual)
    if paper:
        told = ", ".join(f"{number} {name.replace('_', ' ')}" for name, number in paper.items())
        detail += f" (the paper: {told})"
    return Check(track, "batches", "ok" if agrees else "fails", detail), questions


def _optimizer_steps(config: TrainConfig) -> int:
    """Return the optimizer steps on a batch of responses; Lopti takes two for others' one."""
    mini_batches = math.ceil(config.num_responses / config.mini_batch_size)
    return mini_batches if config.rule.lopti_eta is None else 2 * mini_batches


def check_prompts_of(run: Run, questions: Sequence[Question]) -> Check:
    """Encode the prompts with the policy's tokenizer; without one, count characters."""
    model = run.config.model
    if not questions:
        return Check(run.track, "prompts", "absent", "no questions")
    if (policy := _policy_without_weights(model)) is None:
        detail = f"{lengths(questions)}; not encoded: {model} is not a folder here, and nothing is downloaded"
        return Check(run.track, "prompts", "absent", detail)
    try:
        ids = [policy.encode_prompt(question.prompt) for question in questions]
        check_prompts(ids, policy)
    except InputError as error:
        return Check(run.track, "prompts", "fails", str(error))
    sizes = sorted(map(len, ids))
    return Check(run.track, "prompts", "ok", f"{sizes[0]} to {sizes[-1]} tokens; {lengths(questions)}")


@cache
def _policy_without_weights(model: str) -> Policy | None:
    """Return a policy that encodes prompts and knows its context; None if the model is not a local folder."""
    if not (Path(EMBEDDED.get(model, model)) / "config.json").is_file():
        return None
    policy = outline_policy(model)
    return None if policy.tokenizer is None else policy


@dataclass(frozen=True)
class Options:
    scale: str = "paper"
    only: tuple[str, ...] = ()
    """Figures or tables whose runs to check; none: all."""
    out: Path | None = None
    """CSV of the unverified reference answers, a row each."""


def main(options: Options) -> None:
    """Print the results. Then raises InputError if anything present is invalid."""
    found = dry_run(options.scale, only=options.only)
    print(found)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        found.unverified.to_csv(options.out, index=False)
    for row in found.unverified.head(20).itertuples():
        print(f"  {row.file}, row {row.row}: {row.answer!r:.60}: {row.why}")
    if failures := found.named("fails"):
        others = f" (and {len(failures) - 1} more, above)" if len(failures) > 1 else ""
        raise InputError(f"{failures[0].subject}, {failures[0].what}: {failures[0].detail}{others}")


if __name__ == "__main__":
    exit_with(lambda: main(tyro.cli(Options, description=__doc__)))
