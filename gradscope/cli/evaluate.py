"""The command `gradscope evaluate`: how often a policy answers a task's questions right, in one folder."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pandas as pd
import tyro

from gradscope.cli.flags import Many, PolicyFlags, check_prompts, command_progress, load_quietly, print_notes
from gradscope.errors import InputError
from gradscope.policy import Policy, hash_ahead, make_key, make_manifest
from gradscope.resampling import in_brackets
from gradscope.runs import RunFolder, write_parquet, write_text
from gradscope.sampling import Exam, check_count, make_sampler, summarize_responses
from gradscope.tasks import Question, draw_questions, get_task, questions_hash

TABLE, RESPONSES = "evaluation.csv", "responses.parquet"
MADE_UP = 128
"""Questions where neither their number nor files of them are given."""
FORMS = {"format rate": "{:.3f}", "reward": "{:.3f}", "tokens": "{:.1f}", "truncated": "{:.3f}"}
"""What is printed about the form of the responses, and how."""


@dataclass(frozen=True)
class Evaluate(PolicyFlags):
    """Ask a policy a task's questions, greedily and k times each: accuracy, avg@k and pass@k with their intervals."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """Checkpoint folder of transformers, "embedded" or "embedded-certain"."""
    task: str
    """A registered task (knights-knaves, knights-knaves-compact, …) or path/to/file.py:NAME."""
    out: Path
    """Folder for evaluation.csv, responses.parquet and manifest.json. A run that was interrupted is taken up again."""
    k: int = 16
    """Sampled responses to each question, beside the greedy one; 0: greedy only."""
    questions: int | None = None
    """How many questions; none: all of --data, or 128 that the task makes up."""
    data: Annotated[tuple[str, ...], Many] = ()
    """Files of questions, wildcards allowed, as given or below $GRADSCOPE_DATA; none: the task makes questions up."""
    people: Annotated[tuple[int, ...] | None, Many] = None
    """For Knights & Knaves: only puzzles with these numbers of people."""
    temperature: float = 1.0
    """Sampling temperature; every token is drawn from the whole vocabulary."""
    max_new_tokens: int = 1024
    """Longest response; the policy's context ends one too."""
    seed: int = 0
    """Draws the questions and the responses."""
    engine: Literal["hf", "vllm"] = "hf"
    """The engine that samples: transformers or vLLM."""
    batch_size: int = 64
    """hf: responses decoded together; changes speed and memory only."""
    vllm_memory: float = 0.4
    """vllm: share of the GPU's memory for its weights and KV cache, beside the policy's own weights."""
    overwrite: bool = False
    """Replace a run with other arguments in the same folder."""

    def run(self) -> None:
        if (self.questions is not None and self.questions < 1) or self.seed < 0:
            raise InputError(f"--questions is {self.questions} and --seed {self.seed}; give 1 or more, and 0 or more")
        task = get_task(self.task)
        count = self.questions if self.questions is not None or self.data else MADE_UP
        check_count(count or 1, 1 + self.k)
        questions = draw_questions(task, count, seed=self.seed, files=self.data, people=self.people)
        check_prompts(questions, parquet=True)
        hash_ahead(self.model)
        policy = load_quietly(self.model, self.loading)
        settings = {
            "temperature": self.temperature,
            "max_new_tokens": self.max_new_tokens,
            "seed": self.seed,
            "k": self.k,
        }
        folder = RunFolder(self.out, self._key(policy, questions, settings), results=(TABLE, RESPONSES))
        if folder.status(overwrite=self.overwrite) == "finished":
            folder.check(TABLE)
            report = self._report_again()
            print(f"already evaluated with these arguments: {self.out / TABLE}\n{report}")
            return
        sampling = {"batch_size": self.batch_size, "memory": self.vllm_memory, "progress": command_progress()}
        with closing(make_sampler(self.engine, policy, **sampling)) as sampler:
            exam = Exam(policy, task, questions, sampler=sampler, **settings)
            with folder.writing():
                self._evaluate(exam, folder)
        print_notes(policy.length_notes(self.max_new_tokens))
        print(self._report(read_table(self.out / TABLE)))

    def _key(self, policy: Policy, questions: Sequence[Question], settings: dict[str, Any]) -> dict[str, Any]:
        asked = {"number_of_questions": len(questions), "questions": questions_hash(questions), "engine": self.engine}
        asked["chat_template_kwargs"] = self.chat_template_kwargs
        return make_key(policy, {"task": self.task, "settings": settings, **asked})

    def _evaluate(self, exam: Exam, folder: RunFolder) -> None:
        """Parts hold responses without grades: a task that raises is mended, and no response is sampled again."""
        if folder.begin(overwrite=self.overwrite):
            print(f"resuming the unfinished run in {folder.folder}")
        graded = []
        with command_progress().stage("evaluating", len(exam.questions), "questions") as advance:
            for part in range(exam.num_parts):
                if not folder.has_part(part):
                    folder.write_part(part, exam.answer(part))
                graded.append(exam.grade(folder.read_part(part)))
                advance(graded[-1]["group"].nunique())
        evaluation = summarize_responses(graded)
        write_text(folder.staged / TABLE, evaluation.table.to_csv(index=False))
        write_parquet(folder.staged / RESPONSES, evaluation.responses)
        facts = {"settings": asdict(self), "seed": self.seed}
        facts |= {"questions": len(exam.questions), "responses": len(evaluation.responses)}
        folder.publish(make_manifest(self.model, exam.policy, folder.key, facts))
        print(f"{len(evaluation.responses):,} responses: {folder.folder / RESPONSES}; table: {folder.folder / TABLE}")

    def _report_again(self) -> str:
        """The report of a finished run; InputError if its table is not the one that was written."""
        try:
            return self._report(read_table(self.out / TABLE))
        except (OSError, ValueError, TypeError, LookupError, ArithmeticError) as error:
            raise InputError(
                f"{self.out / TABLE} is gone or was changed ({type(error).__name__}); give --overwrite to evaluate anew"
            ) from error

    def _report(self, table: pd.DataFrame) -> str:
        """What is printed: the main columns of the table, each with its denominators."""
        questions = int(table["questions"].iloc[-1])
        sampled = f" and {self.k} sampled at temperature {self.temperature:g}" if self.k else ""
        kind = "sampled" if self.k else "greedy"
        rest = ", ".join(name for name in FORMS if column_of(name, kind) in table)
        return (
            f"\n{self.task}, {self.model}: {questions} questions; to each 1 greedy response{sampled}, of at most "
            f"{self.max_new_tokens:,} tokens\n\n{format_table(table, self.k)}\n\n"
            f"[95 % interval of a bootstrap over questions]; {rest}: of the {kind} responses"
        )


def read_table(path: Path) -> pd.DataFrame:
    return pd.read_csv(path, dtype={"level": str})


def format_table(table: pd.DataFrame, k: int) -> str:
    """The main columns of an evaluation's table: accuracies with their intervals, then form, reward and length."""
    shown, kind = table[["level", "questions"]].copy(), "sampled" if k else "greedy"
    for name in ("greedy_accuracy", f"avg@{k}", f"pass@{k}"):
        if name in table:
            bounds = zip(table[name], table[f"{name}_lower"], table[f"{name}_upper"], strict=True)
            cells = [f"{value:.3f}{in_brackets(lower, upper, '{:.3f}'.format)}" for value, lower, upper in bounds]
            shown[name.replace("_", " ")] = cells
    for name, form in FORMS.items():
        if column_of(name, kind) in table:
            shown[name] = table[column_of(name, kind)].map(form.format)
    return shown.to_string(index=False)


def column_of(name: str, kind: str) -> str:
    """Where the table has what is printed as `name`, of the sampled or of the greedy responses."""
    return f"{kind}_{name.replace(' ', '_')}"
