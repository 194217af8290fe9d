"""Evaluation: estimators against enumeration, tables against loops, intervals against a closed form."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import combinations
from math import inf, nan

import numpy as np
import pandas as pd
import pytest
import torch
from support.policies import CONTEXT, make_policy
from support.refusals import refused

from gradscope.rollouts import read_rollouts
from gradscope.runs import write_parquet
from gradscope.sampling import Exam, HFSampler, Sample, evaluate, evaluation
from gradscope.sampling.evaluation import mean_over_questions, pass_at_k
from gradscope.tasks import Grade, Question

WORDS = [f"w{i}" for i in range(4, 96)]


class Parity:
    """A made-up task: right if the last word's number is as even as the answer says, well-formed with two words."""

    name = "parity"

    def questions(self, n: int, *, seed: int) -> list[Question]:
        rng = np.random.default_rng(seed)
        return [Question(" ".join(rng.choice(WORDS, 2)), i % 2 == 0, level=2 + i % 3) for i in range(n)]

    def reward(self, response: str, question: Question) -> float:
        return self.grade(response, question).reward

    def grade(self, response: str, question: Question) -> Grade:
        words = response.split()
        correct = bool(words) and (int(words[-1][1:]) % 2 == 0) == question.answer
        return Grade(2.0 * correct - 0.1 * len(words), correct, format_ok=len(words) >= 2)


class Plain:
    """The same without a grade of its own: no form, and right where the reward is above 0."""

    name = "plain"

    def questions(self, n: int, *, seed: int) -> list[Question]:
        return [replace(question, level=None) for question in Parity().questions(n, seed=seed)]

    def reward(self, response: str, question: Question) -> float:
        return Parity().reward(response, question)


class RandomWords:
    """A sampler that draws words at random; what it drew is kept."""

    def __init__(self) -> None:
        self.drawn: dict[tuple[int, ...], dict[bool, list[Sample]]] = {}

    def sample(
        self, prompt_ids, *, n, temperature, max_new_tokens, generator: torch.Generator, greedy=False
    ) -> list[list[Sample]]:
        groups = []
        for prompt in prompt_ids:
            lengths = torch.randint(1, 4, (n,), generator=generator).tolist()
            ids = [torch.randint(4, 96, (length,), generator=generator).tolist() for length in lengths]
            samples = [Sample(i, [-1.0] * len(i), finished=len(i) < 3) for i in ids]
            self.drawn.setdefault(tuple(prompt), {})[greedy] = samples
            groups.append(samples)
        return groups

    def sync(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None: ...

    def close(self) -> None: ...


@pytest.fixture(scope="module")
def policy():
    return make_policy("llama", tokenizer=True)


def in_order(frame: pd.DataFrame) -> list[list[int]]:
    return [list(ids) for ids in frame["response_ids"]]


# Estimators and intervals.


@pytest.mark.parametrize("n", range(1, 7))
def test_pass_at_k_is_the_share_of_subsets_that_hold_a_right_sample(n):
    for c in range(n + 1):
        right = [True] * c + [False] * (n - c)
        for k in range(1, n + 1):
            subsets = list(combinations(right, k))
            # Both are quotients of integers, rounded once, and one difference.
            assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-15)


def test_pass_at_1_is_the_share_of_right_samples_also_where_binomials_are_huge():
    assert pass_at_k(2000, 700, 1) == pytest.approx(0.35, abs=1e-15)
    assert pass_at_k(2000, 700, 1000) == pytest.approx(1.0)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 1, 0), (4, 1, 5), (4, 5, 2), (4, -1, 2)])
def test_pass_at_k_of_what_cannot_be_drawn_is_refused(n, c, k):
    with refused(f"pass@{k}"):
        pass_at_k(n, c, k)


def test_intervals_cover_the_true_mean_about_as_often_as_they_say():
    rng = np.random.default_rng(2)
    means = [mean_over_questions(rng.random(60) < 0.3, seed=seed) for seed in range(100)]
    covered = np.mean([lower <= 0.3 <= upper for _, lower, upper in means])
    # 95 %, less about 1 point for a percentile bootstrap of 60; the standard error of 100 draws is 2.2 points.
    assert 0.88 <= covered <= 1.0


# Tables.


@pytest.mark.parametrize("k", [0, 1, 5])
def test_scores_and_table_are_those_of_a_double_loop(policy, k):
    task, sampler, count = Parity(), RandomWords(), 2 * evaluation.QUESTIONS_PER_PART + 7
    questions = task.questions(count, seed=0)
    questions = list({question.prompt: question for question in questions}.values())
    result = evaluate(policy, task, questions, k=k, temperature=0.7, seed=3, sampler=sampler)

    expected = []
    for question in questions:
        drawn = sampler.drawn[tuple(policy.encode_prompt(question.prompt))]
        row = {"level": question.level}
        for kind, greedy in (("greedy", True), ("sampled", False)):
            samples = drawn.get(greedy, [])
            row[f"{kind}_responses"] = len(samples)
            grades = [task.grade(policy.decode(sample.response_ids), question) for sample in samples]
            if samples:
                accuracy = f"avg@{k}" if kind == "sampled" else "greedy_accuracy"
                row[accuracy] = sum(grade.correct for grade in grades) / len(samples)
                row[f"{kind}_format_rate"] = sum(grade.format_ok for grade in grades) / len(samples)
                row[f"{kind}_reward"] = sum(grade.reward for grade in grades) / len(samples)
                row[f"{kind}_tokens"] = sum(len(sample.response_ids) for sample in samples) / len(samples)
                row[f"{kind}_truncated"] = sum(not sample.finished for sample in samples) / len(samples)
            for j in {1: [], 5: [2, 4, 5]}.get(len(samples), []) if not greedy else []:
                subsets = list(combinations([grade.correct for grade in grades], j))
                row[f"pass@{j}"] = sum(map(any, subsets)) / len(subsets)
        expected.append(row)
    scores = pd.DataFrame(expected)
    assert set(result.scores.columns) == set(scores.columns)
    # Means of at most five numbers, summed in another order.
    pd.testing.assert_frame_equal(
        result.scores[scores.columns], scores, check_dtype=False, check_names=False, rtol=1e-12, atol=1e-12
    )

    table = result.table.set_index("level")
    assert list(table.index) == ["2", "3", "4", "all"]
    for level in table.index:
        rows = [row for row in expected if level in (str(row["level"]), "all")]
        row = table.loc[level]
        assert row["questions"] == row["greedy_responses"] == len(rows) and row["sampled_responses"] == k * len(rows)
        for name in scores.columns.drop(["level", "greedy_responses", "sampled_responses"]):
            values = np.array([row[name] for row in rows])
            assert row[name] == pytest.approx(values.mean(), abs=1e-12)
            _, *bounds = mean_over_questions(values, seed=0)
            assert (row[f"{name}_lower"], row[f"{name}_upper"]) == pytest.approx(tuple(bounds), abs=1e-12)
            assert row[f"{name}_lower"] <= row[name] <= row[f"{name}_upper"]


# Asking.


def test_a_part_does_not_depend_on_the_parts_before_it_nor_on_the_batch_size(policy, monkeypatch):
    monkeypatch.setattr(evaluation, "QUESTIONS_PER_PART", 3)
    task, settings = Parity(), {"k": 2, "max_new_tokens": 6, "seed": 5}
    questions = task.questions(8, seed=0)
    whole = evaluate(policy, task, questions, **settings).responses
    assert whole["group"].tolist() == [i for i in range(8) for _ in range(3)]
    assert whole["greedy"].tolist() == [True, False, False] * 8
    sampler = HFSampler(policy, batch_size=2, progress=False)
    exam = Exam(policy, task, questions, sampler=sampler, **settings)
    backwards = {part: exam.answer(part) for part in (2, 0, 1)}
    assert exam.num_parts == 3
    assert [ids for part in range(3) for ids in in_order(backwards[part])] == in_order(whole)
    sampled = whole[~whole["greedy"]]
    assert len({tuple(ids) for ids in sampled["response_ids"]}) > 12  # no part repeats another's random numbers


def test_the_greedy_response_takes_the_likeliest_token_every_time(policy):
    questions = Parity().questions(3, seed=0)
    responses = evaluate(policy, Parity(), questions, k=2, max_new_tokens=5, temperature=0.5).responses
    for question, ids in zip(questions, responses.loc[responses["greedy"], "response_ids"], strict=True):
        prompt = policy.encode_prompt(question.prompt)
        for place, token in enumerate(ids):
            with torch.no_grad():
                logits = policy.model(torch.tensor([prompt + ids[:place]]), use_cache=False).logits[0, -1]
            assert token == int(logits.argmax())


def test_the_responses_are_rollouts_that_can_be_measured(policy, tmp_path):
    questions = Parity().questions(3, seed=0)
    responses = evaluate(policy, Parity(), questions, k=2, max_new_tokens=6, temperature=0.5).responses
    sampled = responses[~responses["greedy"]].reset_index(drop=True)
    write_parquet(tmp_path / "sampled.parquet", sampled)
    batch = read_rollouts(tmp_path / "sampled.parquet", policy)
    assert batch.group_ids.tolist() == [0, 0, 1, 1, 2, 2] and batch.temperature.tolist() == [0.5] * 6
    assert batch.rewards.tolist() == pytest.approx(sampled["reward"].tolist())
    assert batch.sequence(3)[0].tolist() == [*sampled["prompt_ids"][3], *sampled["response_ids"][3]]


# Refusals.


@pytest.mark.parametrize(
    ("name", "value"),
    [("k", -1), ("max_new_tokens", 0), ("seed", -1), *(("temperature", value) for value in (0.0, inf, nan))],
)
def test_settings_that_make_no_sense_are_refused(policy, name, value):
    settings = {name: value}
    with refused(name, value):
        evaluate(policy, Parity(), Parity().questions(2, seed=0), **settings)


def test_a_prompt_without_room_is_named_before_anything_is_sampled(policy):
    sampler = RandomWords()
    questions = [Question("w4", True), Question("w4 " * CONTEXT, True)]
    with refused("prompt 1", CONTEXT):
        evaluate(policy, Parity(), questions, sampler=sampler)
    with refused("prompt 0"):
        evaluate(policy, Parity(), [Question("", True)], sampler=sampler)
    assert sampler.drawn == {}


@pytest.mark.parametrize("earned", [nan, ZeroDivisionError("1 / 0")])
def test_a_reward_that_raises_or_is_not_finite_is_an_input_error(policy, earned):
    class Broken(Plain):
        def reward(self, response: str, question: Question) -> float:
            if isinstance(earned, Exception):
                raise earned
            return earned

    with refused("plain"):
        evaluate(policy, Broken(), Plain().questions(2, seed=0), k=1, sampler=RandomWords())
