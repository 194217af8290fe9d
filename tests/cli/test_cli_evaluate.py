"""`gradscope evaluate`: what it writes, that a killed run goes on to the same files, and what it refuses."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pandas as pd
import pytest
from support.cli import Outcome, assert_one_line, outcome_of
from support.policies import save_checkpoint
from support.processes import Command

from gradscope.policy import load_policy
from gradscope.runs import folder as run_folder
from gradscope.sampling import evaluate
from gradscope.sampling.evaluation import QUESTIONS_PER_PART
from gradscope.tasks import get_task, registry

PARITY = """
from gradscope.tasks import Grade, Question, register

class Parity:
    name = "parity"

    def questions(self, n, *, seed, people=(2, 3)):
        levels = [people[i % len(people)] for i in range(n)]
        return [Question(f"w{4 + (seed + i) % 90} w{4 + i % 7}", i % 2, level) for i, level in enumerate(levels)]

    def reward(self, response, question):
        return self.grade(response, question).reward

    def grade(self, response, question):
        correct = len(response.split()) % 2 == question.answer
        return Grade(2.0 * correct - 1.0, correct, "w5" not in response)

register(Parity())
"""
SHORT = ("--k", 2, "--max-new-tokens", 6, "--questions", 5)
RESULTS = {"evaluation.csv", "responses.parquet", "manifest.json"}


@pytest.fixture
def run(capsys, monkeypatch):
    """Run `gradscope evaluate` in this process; a task that it registers is forgotten."""

    def call(*args: object) -> Outcome:
        monkeypatch.setattr(registry, "_tasks", dict(registry._tasks))
        monkeypatch.setattr("gradscope.runs.user_code._files_read", {})
        return outcome_of(capsys, "evaluate", *args)

    return call


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("model") / "llama", "llama", sharpness=5.0)


@pytest.fixture
def task(tmp_path) -> str:
    (tmp_path / "parity.py").write_text(PARITY, encoding="utf-8")
    return f"{tmp_path / 'parity.py'}:parity"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


# What it writes.


def test_the_embedded_policy_is_evaluated_on_puzzles_of_each_size(run, tmp_path):
    flags = ("--k", 2, "--questions", 4, "--people", 2, 3, "--temperature", 0.7, "--max-new-tokens", 120)
    outcome = run("embedded", "--task", "knights-knaves-compact", "--out", tmp_path / "out", *flags)
    assert (outcome.status, outcome.err) == (0, "")
    assert "4 questions, each with 1 greedy response and 2 sampled at temperature 0.7" in outcome.out
    table = pd.read_csv(tmp_path / "out" / "evaluation.csv").set_index("level")
    assert table.index.tolist() == ["2", "3", "all"] and table["questions"].tolist() == [2, 2, 4]
    assert table["sampled_responses"].tolist() == [4, 4, 8]
    responses = pd.read_parquet(tmp_path / "out" / "responses.parquet")
    puzzles = get_task("knights-knaves-compact").questions(4, seed=0, people=(2, 3))
    for row in responses.itertuples():
        assert row.prompt == puzzles[row.group].prompt and row.level == len(puzzles[row.group].answer["names"])
        earned = get_task("knights-knaves-compact").reward(row.response, puzzles[row.group])
        assert (row.reward, row.correct, row.format_ok) == (earned, earned == 3.0, earned > -3.0)
    assert table["avg@2"]["all"] == pytest.approx(responses.loc[~responses["greedy"], "correct"].mean())


def test_it_writes_what_the_function_returns_and_a_manifest(run, model, task, tmp_path):
    out = tmp_path / "out"
    outcome = run(model, "--task", task, "--out", out, *SHORT, "--seed", 3, "--people", 4, 5, "--batch-size", 3)
    assert (outcome.status, outcome.err) == (0, "") and set(os.listdir(out)) == RESULTS
    parity = get_task("parity")
    questions = parity.questions(5, seed=3, people=(4, 5))
    expected = evaluate(load_policy(model), parity, questions, k=2, max_new_tokens=6, seed=3)
    table = pd.read_csv(out / "evaluation.csv", dtype={"level": str})
    pd.testing.assert_frame_equal(table, expected.table, check_dtype=False, rtol=1e-12)
    responses = pd.read_parquet(out / "responses.parquet")
    assert list(responses.columns) == list(expected.responses.columns)
    for name in ("prompt_ids", "response_ids"):
        assert [list(ids) for ids in responses[name]] == expected.responses[name].tolist()
    for name in ("prompt", "response", "group", "reward", "correct", "format_ok", "level", "finished", "greedy"):
        assert responses[name].tolist() == expected.responses[name].tolist()
    manifest = json.loads((out / "manifest.json").read_text())
    assert (manifest["questions"], manifest["responses"], manifest["seed"]) == (5, 15, 3)
    assert manifest["settings"]["k"] == 2 and manifest["settings"]["task"] == task
    assert manifest["key"]["model"] == manifest["model"]["sha256"] and set(manifest["files"]) == RESULTS - {
        "manifest.json"
    }


# Taken up again.


def test_a_finished_evaluation_is_told_again_and_left_alone(run, model, task, tmp_path):
    args = (model, "--task", task, "--out", tmp_path / "out", *SHORT)
    first = run(*args)
    before = contents(tmp_path / "out")
    again = run(*args, "--batch-size", 2)
    assert again.status == 0 and "already evaluated" in again.out and contents(tmp_path / "out") == before
    table = tmp_path / "out" / "evaluation.csv"
    table.unlink()
    assert_one_line(run(*args), "evaluation.csv")
    table.write_bytes(before["evaluation.csv"])
    assert first.out.splitlines()[1:] == again.out.splitlines()[1:]  # the same table
    assert_one_line(run(*args, "--temperature", 0.5), "temperature 1.0, not 0.5")
    assert contents(tmp_path / "out") == before
    assert run(*args, "--temperature", 0.5, "--overwrite").status == 0 and contents(tmp_path / "out") != before


@pytest.mark.all
def test_killed_in_the_middle_it_goes_on_to_the_files_of_an_undisturbed_run(run, model, task, tmp_path, monkeypatch):
    killed, whole, parts = tmp_path / "killed", tmp_path / "whole", 3
    flags = ("--k", 1, "--max-new-tokens", 10, "--questions", parts * QUESTIONS_PER_PART - 3)
    args = (model, "--task", task, *flags, "--out")
    first = killed / ".partial" / "part-000000.parquet"
    assert Command("-m", "gradscope", "evaluate", *args, killed).kill_when(first.is_file).stderr == ""
    done = len(list((killed / ".partial").glob("part-*")))
    assert 1 <= done < parts and set(os.listdir(killed)) == {".partial", ".lock"}
    assert_one_line(run(*args, killed, "--seed", 1), "holds an unfinished run with other arguments")

    written, right = [], run_folder.RunFolder.write_part
    monkeypatch.setattr(run_folder.RunFolder, "write_part", lambda *a: (written.append(a[1]), right(*a)))
    resumed = run(*args, killed)
    assert resumed.status == 0 and "resuming the unfinished run" in resumed.out
    assert written == list(range(done, parts))
    assert run(*args, whole).status == 0
    for name in ("evaluation.csv", "responses.parquet"):
        assert (killed / name).read_bytes() == (whole / name).read_bytes()
    assert set(os.listdir(killed)) == set(os.listdir(whole)) == RESULTS


def test_what_a_broken_reward_could_not_grade_is_graded_when_it_is_mended(run, model, task, tmp_path, monkeypatch):
    file, args = tmp_path / "parity.py", (model, "--task", task, "--out", tmp_path / "out", *SHORT)
    file.write_text(PARITY.replace("correct = len", "1 / 0; correct = len"), encoding="utf-8")
    outcome = run(*args)
    assert_one_line(outcome, "reward of task 'parity' raised ZeroDivisionError")
    file.write_text(PARITY, encoding="utf-8")
    with monkeypatch.context() as patch:
        patch.setattr("gradscope.sampling.evaluation.Exam.answer", None)  # nothing is sampled again
        assert run(*args).status == 0
    assert run(model, "--task", task, "--out", tmp_path / "whole", *SHORT).status == 0
    assert (tmp_path / "out" / "responses.parquet").read_bytes() == (
        tmp_path / "whole" / "responses.parquet"
    ).read_bytes()


# Refused.


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--task", "knights"), "no task is called 'knights'"),
        (("--task", "nowhere.py:x"), "does not exist"),
        (("--k", "-1"), "k is -1"),
        (("--k", "2000000"), "2000001 responses to each of 5 questions are more than 10,000,000"),
        (("--questions", str(10**20)), "more than 10,000,000"),
        (("--temperature", "1e-300"), "temperature is 1e-300: logits divided by it overflow"),
        (("--out", "/proc/a"), "/proc/a/manifest.json cannot be written (No such file or directory); give another"),
        (("--questions", "0"), "--questions is 0"),
        (("--seed", "-1"), "--seed -1"),
        (("--temperature", "0"), "temperature is 0"),
        (("--max-new-tokens", "0"), "max_new_tokens is 0"),
        (("--batch-size", "0"), "batch_size is 0"),
        (("--device", "nowhere"), "device 'nowhere'"),
        (("--data", "no.parquet"), "has no option files"),
        (("--task", "knights-knaves", "--data", "no.parquet"), "no file matches no.parquet"),
        (("--task", "knights-knaves", "--people", "9"), "9 people"),
    ],
)
def test_what_it_cannot_do_is_refused_in_one_line_and_writes_nothing(run, model, task, tmp_path, flags, words):
    assert_one_line(run(model, "--task", task, "--out", tmp_path / "out", *SHORT, *flags), words)
    assert not (tmp_path / "out").exists()


def test_a_run_that_is_refused_keeps_the_finished_one(run, model, task, tmp_path):
    args = (model, "--task", task, "--out", tmp_path / "out", *SHORT)
    assert run(*args).status == 0
    before = contents(tmp_path / "out")
    (tmp_path / "out" / ".partial").write_text("mine")
    assert_one_line(run(*args, "--seed", 1, "--overwrite"), ".partial is not a folder")
    (tmp_path / "out" / ".partial").unlink()
    (tmp_path / "parity.py").write_text(PARITY.replace("correct = len", "1 / 0; correct = len"))
    assert_one_line(run(*args, "--seed", 1, "--overwrite"), "raised ZeroDivisionError")
    assert {name: text for name, text in contents(tmp_path / "out").items() if ".partial" not in name} == before
    (tmp_path / "parity.py").write_text(PARITY)
    assert "already evaluated" in run(*args).out
    assert "resuming the unfinished run" in run(*args, "--seed", 1).out
    assert set(os.listdir(tmp_path / "out")) == RESULTS and contents(tmp_path / "out") != before
