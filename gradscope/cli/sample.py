"""`gradscope sample`: samples rollouts from a policy."""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from gradscope.cli.flags import (
    DecodingFlags,
    Many,
    Model,
    PolicyFlags,
    SamplingFlags,
    check_prompts,
    command_progress,
    load_quietly,
    print_notes,
)
from gradscope.errors import InputError, first_line
from gradscope.policy import check_prompt
from gradscope.runs import PACKED, check_is_folder, check_writable, counted, parse_json, read_lines


@dataclass(frozen=True, kw_only=True)
class Sample(DecodingFlags, SamplingFlags, PolicyFlags):
    """Sample responses from a policy into a rollout file for `measure`: JSONL or parquet, a row per response."""

    model: Model
    """Checkpoint folder of transformers, "embedded" or "embedded-certain"."""
    out: Path
    """File to write: .jsonl or .parquet."""
    people: Annotated[tuple[int, ...], Many] = ()
    """For Knights & Knaves: only puzzles with these numbers of people; none: all."""
    overwrite: bool = False
    """Replace the file if it exists."""

    def run(self) -> None:
        self.sample()
        print(f"next: gradscope measure {self.model} {self.out} --out DIR")

    def sample(self) -> None:
        """Sample into the file, and summarize it."""
        from gradscope.rollouts import write_rollouts
        from gradscope.sampling import check_count, make_sampler, rollout_rows
        from gradscope.tasks import draw_questions, get_task

        if (self.task is None) == (self.prompts is None):
            raise InputError("give exactly one of --task NAME and --prompts FILE")
        if self.out.suffix not in (".jsonl", ".parquet"):
            raise InputError(f"--out is {self.out}; rollouts are written as .jsonl or .parquet")
        check_is_folder(self.out.parent)
        check_writable(self.out)
        if self.out.is_dir() or (self.out.exists() and not self.overwrite):
            raise InputError(f"{self.out} exists; give another --out or, if it is a file, --overwrite")
        if self.questions < 1 or self.seed < 0:
            raise InputError(f"--questions is {self.questions} and --seed {self.seed}; give 1 or more, and 0 or more")
        task = None if self.task is None else get_task(self.task)
        if task is None:
            questions = read_prompts(self.prompts)
        else:
            check_count(self.questions, self.n)
            options = {"files": self.data, "people": self.people}
            questions = draw_questions(task, self.questions, seed=self.seed, **options)
        check_prompts(questions, parquet=self.out.suffix == ".parquet")
        policy = load_quietly(self.model, self.loading)
        settings = {"temperature": self.temperature, "max_new_tokens": self.max_new_tokens, "seed": self.seed}
        sampling = {"batch_size": self.batch_size, "progress": command_progress()}
        with closing(make_sampler(self.engine, policy, **sampling)) as sampler:
            rows = rollout_rows(policy, questions, task=task, sampler=sampler, n=self.n, **settings)
        print_notes(policy.length_notes(self.max_new_tokens))
        self.out.parent.mkdir(parents=True, exist_ok=True)
        write_rollouts(self.out, rows)
        tokens = sum(len(row["response_ids"]) for row in rows)
        rewards = [row["reward"] for row in rows if "reward" in row]
        mean = f", mean reward {sum(rewards) / len(rewards):.2f}" if rewards else ""
        answers = counted(len(rows), "response")
        print(f"{answers} to {counted(len(questions), 'prompt')}, {counted(tokens, 'token')}{mean}: {self.out}")


def read_prompts(path: Path) -> list[Any]:
    """Read prompts as questions without answers, from a text file (one per line) or JSONL with a field "prompt"."""
    from gradscope.tasks import Question

    if not os.path.isfile(path):  # of a name that is too long, Path raises
        raise InputError(f"{path} does not exist; give a file with one prompt per line, or JSONL with a field 'prompt'")
    if path.suffix in (".json", *PACKED):
        raise InputError(
            f"{path} is {path.suffix}; give .jsonl with a field 'prompt', or a text file with one prompt per line"
        )
    try:
        lines = [
            (number, line.decode("utf-8-sig" if number == 1 else "utf-8").removesuffix("\n").removesuffix("\r"))
            for number, line in enumerate(read_lines(path), 1)
            if line.strip()
        ]
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 ({error}); give a text file") from error
    lines = [(number, line) for number, line in lines if line.strip()]
    if not lines:
        raise InputError(f"{path} is empty; give a prompt per line")
    if path.suffix != ".jsonl":
        return [Question(line, None) for _, line in lines]
    return [Question(_parse_prompt(f"{path}, line {number}", line), None) for number, line in lines]


def _parse_prompt(place: str, line: str) -> str | list[dict[str, str]]:
    try:
        prompt = parse_json(line)["prompt"]
    except (ValueError, LookupError, TypeError) as error:
        raise InputError(
            f'{place}: not a JSON object with a field "prompt" ({first_line(error)}); write {{"prompt": "…"}}'
        ) from error
    check_prompt(prompt, place)
    return prompt
