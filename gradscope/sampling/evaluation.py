"""Evaluation of a policy: greedy accuracy, avg@k and pass@k, with intervals from a bootstrap over questions.

A question gets one greedy response and k sampled ones. Its score is the mean over its responses (for pass@j, the
unbiased estimator), and a table's entry is the mean over questions. Responses to one question are not independent, so
the bootstrap resamples whole questions. Intervals are 95 % percentile bootstraps, or NaN if all questions score alike,
since resampling would then suggest certainty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from gradscope.errors import InputError, checked
from gradscope.intervals import summarize
from gradscope.policy import Policy
from gradscope.resampling import Resampling
from gradscope.sampling.hf import HFSampler, check_prompts, check_settings
from gradscope.sampling.protocol import Sampler
from gradscope.sampling.rollouts import check_count, rollout_rows
from gradscope.tasks import Question, Task, grade_response

QUESTIONS_PER_PART = 64
"""Questions sampled and seeded together; a change affects the responses of a seed."""


@dataclass(frozen=True)
class Evaluation:
    """A policy's responses to a task's questions, and its scores."""

    table: pd.DataFrame
    """A row per level and one for all questions (`tabulate`)."""
    scores: pd.DataFrame
    """A row per question (`score_questions`)."""
    responses: pd.DataFrame
    """A row per response, in the native rollout format, with correct, format_ok (NA for tasks without a format), level,
    finished (False if cut off) and greedy. Do not measure greedy responses, which are not draws from π."""


class Exam:
    """Questions for a policy, answered in independent parts."""

    def __init__(
        self,
        policy: Policy,
        task: Task,
        questions: Sequence[Question],
        *,
        k: int = 16,
        temperature: float = 1.0,
        max_new_tokens: int = 1024,
        seed: int = 0,
        sampler: Sampler | None = None,
    ) -> None:
        """Take the arguments of `evaluate`. Raises InputError for unusable ones, before anything is sampled."""
        if k < 0 or seed < 0:
            raise InputError(f"k is {k} and seed {seed}; give 0 or more for both (k = 0: greedy only)")
        check_settings(max(k, 1), temperature, max_new_tokens)
        if not questions:
            raise InputError(f"task {task.name!r} has no questions left; give at least one")
        check_count(len(questions), k + 1)
        self.policy, self.task, self.questions = policy, task, list(questions)
        self.k, self.temperature, self.max_new_tokens, self.seed = k, temperature, max_new_tokens, seed
        self.sampler = HFSampler(policy) if sampler is None else sampler
        # Check all prompts now, rather than fail after hours of sampling.
        check_prompts([policy.encode_prompt(question.prompt) for question in self.questions], policy)

    @property
    def num_parts(self) -> int:
        return -(-len(self.questions) // QUESTIONS_PER_PART)

    def answer(self, part: int) -> pd.DataFrame:
        """Sample one part of the questions, ungraded: one greedy response and k sampled ones each."""
        numbers = range(len(self.questions))[part * QUESTIONS_PER_PART :][:QUESTIONS_PER_PART]
        seed = int(np.random.default_rng([self.seed, part]).integers(2**62))
        rows = self._ask(numbers, 1, seed, greedy=True)
        if self.k:
            rows += self._ask(numbers, self.k, seed, greedy=False)
        frame = pd.DataFrame(rows).astype({"level": "Int64"})
        return frame.sort_values("group", kind="stable", ignore_index=True)

    def grade(self, responses: pd.DataFrame) -> pd.DataFrame:
        """Add reward, correct and format_ok to the rows. Raises InputError if the task cannot grade a response."""
        grades = [
            grade_response(self.task, response, self.questions[group])
            for response, group in zip(responses["response"], responses["group"], strict=True)
        ]
        return responses.assign(
            reward=[float(grade.reward) for grade in grades],
            correct=[bool(grade.correct) for grade in grades],
            format_ok=pd.array([grade.format_ok for grade in grades], dtype="boolean"),
        )

    def _ask(self, numbers: range, n: int, seed: int, *, greedy: bool) -> list[dict[str, Any]]:
        rows = rollout_rows(
            self.policy,
            [self.questions[number] for number in numbers],
            sampler=self.sampler,
            n=n,
            temperature=float(self.temperature),
            max_new_tokens=self.max_new_tokens,
            seed=seed,
            greedy=greedy,
        )
        return [row | {"group": numbers[row["group"]], "greedy": greedy} for row in rows]


@checked
def evaluate(
    policy: Policy,
    task: Task,
    questions: Sequence[Question],
    *,
    k: int = 16,
    temperature: float = 1.0,
    max_new_tokens: int = 1024,
    seed: int = 0,
    sampler: Sampler | None = None,
) -> Evaluation:
    """Answer every question once greedily and k times at the sampling temperature, and grade the responses.

    k: 0 skips sampling.
    max_new_tokens: longest response, also limited by the policy's context.
    sampler: default HFSampler(policy).

    Raises InputError without questions, if a prompt leaves no room in the context, for negative k or a temperature that
    is not positive, and if the task's reward raises.
    """
    settings = {"k": k, "temperature": temperature, "max_new_tokens": max_new_tokens, "seed": seed}
    exam = Exam(policy, task, questions, sampler=sampler, **settings)
    return summarize_responses([exam.grade(exam.answer(part)) for part in range(exam.num_parts)])


def summarize_responses(parts: Sequence[pd.DataFrame]) -> Evaluation:
    """Combine graded parts of responses into an Evaluation."""
    responses = pd.concat(parts, ignore_index=True)
    scores = score_questions(responses)
    return Evaluation(tabulate(scores), scores, responses)


def score_questions(responses: pd.DataFrame) -> pd.DataFrame:
    """Return a row per question, indexed by `group`, with means over its responses.

    Columns: level; greedy_responses and sampled_responses (counts); greedy_accuracy, greedy_format_rate, greedy_reward,
    greedy_tokens, greedy_truncated; for the k samples avg@k (accuracy), pass@j for powers of two j from 2 to k and k
    itself, then sampled_format_rate and so on. `tokens` is the length of a response, `truncated` the fraction without a
    stop token. Columns that do not apply are left out, such as the format rate of a task without a format.
    """
    values = pd.DataFrame(
        {
            "accuracy": responses["correct"].astype(float),
            "format_rate": responses["format_ok"].astype("Float64").to_numpy(float, na_value=np.nan),
            "reward": responses["reward"],
            "tokens": responses["response_ids"].map(len),
            "truncated": 1.0 - responses["finished"].astype(float),
        }
    )
    levels, group = responses.groupby("group")["level"].first(), responses["group"]
    scores, kinds = [levels], {"greedy": responses["greedy"], "sampled": ~responses["greedy"]}
    for kind, chosen in kinds.items():
        counts = chosen.groupby(group).sum().rename(f"{kind}_responses")
        means = values[chosen].groupby(group[chosen]).mean().add_prefix(f"{kind}_")
        scores += [counts, means] if chosen.any() else [counts]
    table = pd.concat(scores, axis=1)
    if kinds["sampled"].any():
        table = _add_pass_at_k(table, responses.loc[kinds["sampled"], "correct"].groupby(group).sum())
    return table.drop(columns=[name for name in table if name.endswith("_format_rate") and table[name].isna().all()])


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Return the probability that k samples drawn without replacement contain a correct one: 1 − C(n−c, k) / C(n, k).

    The unbiased estimator of the chance that one of k new samples is right (arXiv:2107.03374, Eq. 1).

    >>> pass_at_k(4, 1, 2)
    0.5
    """
    if not (1 <= k <= num_samples and 0 <= num_correct <= num_samples):
        raise InputError(
            f"pass@{k} of {num_samples} samples with {num_correct} right ones; give 1 to {num_samples} for k and 0 to "
            f"{num_samples} right ones"
        )
    return 1 - comb(num_samples - num_correct, k) / comb(num_samples, k)


def tabulate(scores: pd.DataFrame) -> pd.DataFrame:
    """Return a row per level, in ascending order, and one for "all", with means over questions.

    scores: from `score_questions`. Columns: level, questions, greedy_responses and sampled_responses (sums, the
    denominators), then each score with its interval, as NAME, NAME_lower and NAME_upper.
    """
    levels = sorted(scores["level"].dropna().unique())
    groups = {str(level): scores[scores["level"] == level] for level in levels} | {"all": scores}
    counts = ["greedy_responses", "sampled_responses"]
    rows = []
    for name, group in groups.items():
        row = {"level": name, "questions": len(group)} | {count: int(group[count].sum()) for count in counts}
        for column in scores.columns.drop(["level", *counts]):
            names = (column, f"{column}_lower", f"{column}_upper")
            row |= dict(zip(names, mean_over_questions(group[column]), strict=True))
        rows.append(row)
    return pd.DataFrame(rows)


def mean_over_questions(scores: npt.ArrayLike, *, seed: int = 0) -> tuple[float, float, float]:
    """Average scores over questions, ignoring NaN; return the mean with its 95 % bootstrap interval.

    The bounds are NaN if all questions score alike.
    """
    scores = np.asarray(scores, dtype=float)
    one_interval = np.zeros(len(scores), dtype=int)
    rng, questions = np.random.default_rng(seed), np.arange(len(scores))
    row = summarize(scores, one_interval, questions, resampling=Resampling(rng), edges=(0.0, 1.0)).iloc[0]
    value, *bounds = (float(row[name]) for name in ("value", "lower", "upper"))
    varies = len(np.unique(scores[~np.isnan(scores)])) > 1
    return value, *(bounds if varies else (np.nan, np.nan))


def _add_pass_at_k(table: pd.DataFrame, num_correct: pd.Series) -> pd.DataFrame:
    """Rename the sampled accuracy to avg@k and add the pass@j columns."""
    counts = table["sampled_responses"].unique()
    if len(counts) != 1:
        raise InputError(f"questions have {counts.min()} to {counts.max()} sampled responses; give all the same number")
    [k] = counts.tolist()
    table = table.rename(columns={"sampled_accuracy": f"avg@{k}"})
    place = table.columns.get_loc(f"avg@{k}") + 1
    for j in dict.fromkeys([*(2**power for power in range(1, k.bit_length())), k]):
        if j > 1:  # pass@1 is avg@k
            table.insert(place, f"pass@{j}", num_correct.map(lambda c, j=j: pass_at_k(k, c, j)))
            place += 1
    return table
