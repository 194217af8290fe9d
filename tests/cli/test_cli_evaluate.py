"""`gradscope evaluate`: what it writes, that a killed run goes on to the same files, and what it refuses."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
from support.adapters import save_adapter
from support.cli import Outcome, assert_one_line, outcome_of
from support.policies import save_checkpoint

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
        monkeypatch.setattr(registry, "_files_read", {})
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
    assert "4 questions; to each 1 greedy response and 2 sampled at temperature 0.7" in outcome.out
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


def test_the_printed_table_has_the_numbers_and_intervals_of_the_file(run, model, task, tmp_path):
    outcome = run(model, "--task", task, "--out", tmp_path / "out", *SHORT)
    table = pd.read_csv(tmp_path / "out" / "evaluation.csv").set_index("level")
    line = next(line for line in outcome.out.splitlines() if line.split()[:1] == ["all"])
    names = ("greedy_accuracy", "avg@2", "pass@2")
    cells = [
        f"{table[n]['all']:.3f} [{table[n + '_lower']['all']:.3f}, {table[n + '_upper']['all']:.3f}]" for n in names
    ]
    rest = [f"{table[f'sampled_{n}']['all']:.3f}" for n in ("format_rate", "reward")]
    assert line.split() == ["all", "5", *" ".join(cells).split(), *rest, *line.split()[-2:]]
    assert f"{table['sampled_tokens']['all']:.1f}" == line.split()[-2]


def test_k_0_is_greedy_only(run, model, task, tmp_path):
    outcome = run(model, "--task", task, "--out", tmp_path / "out", *SHORT, "--k", 0)
    assert outcome.status == 0 and "to each 1 greedy response, of" in outcome.out and "avg@" not in outcome.out
    table = pd.read_csv(tmp_path / "out" / "evaluation.csv")
    assert not [name for name in table if "@" in name or name == "sampled_reward"]
    assert pd.read_parquet(tmp_path / "out" / "responses.parquet")["greedy"].all()


def test_a_chat_survives_being_written_and_read(run, model, tmp_path):
    chat = PARITY.replace("Question(f", "Question(wrap(f", 1).replace('}", i % 2, level)', '}"), i % 2, level)', 1)
    chat += "\ndef wrap(text):\n    return [{'role': 'user', 'content': text}]\n"
    (tmp_path / "chat.py").write_text(chat, encoding="utf-8")
    folder = save_checkpoint(tmp_path / "chatty", "llama", chat=True)
    outcome = run(folder, "--task", f"{tmp_path / 'chat.py'}:parity", "--out", tmp_path / "out", *SHORT)
    assert outcome.status == 0, outcome.err
    prompts = pd.read_parquet(tmp_path / "out" / "responses.parquet")["prompt"]
    assert [list(prompt) for prompt in prompts[:1]] == [[{"role": "user", "content": "w4 w4"}]]


# Taken up again.


def test_a_finished_evaluation_is_told_again_and_left_alone(run, model, task, tmp_path):
    args = (model, "--task", task, "--out", tmp_path / "out", *SHORT)
    first = run(*args)
    before = contents(tmp_path / "out")
    again = run(*args, "--batch-size", 2)
    assert again.status == 0 and "already evaluated" in again.out and contents(tmp_path / "out") == before
    assert first.out.splitlines()[1:] == again.out.splitlines()[1:]  # the same table
    assert_one_line(run(*args, "--temperature", 0.5), "temperature 1.0, not 0.5")
    assert contents(tmp_path / "out") == before
    assert run(*args, "--temperature", 0.5, "--overwrite").status == 0 and contents(tmp_path / "out") != before


def test_killed_in_the_middle_it_goes_on_to_the_files_of_an_undisturbed_run(run, model, task, tmp_path, monkeypatch):
    killed, whole, parts = tmp_path / "killed", tmp_path / "whole", 3
    flags = ("--k", 1, "--max-new-tokens", 10, "--questions", parts * QUESTIONS_PER_PART - 3)
    args = (model, "--task", task, *flags, "--out")
    command = [sys.executable, "-m", "gradscope", "evaluate", *map(str, args), str(killed)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=os.environ)
    first, end = killed / ".partial" / "part-000000.parquet", time.monotonic() + 120
    while not first.is_file() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    _, noise = process.communicate()
    assert (process.returncode, noise) == (-signal.SIGKILL, b"")
    done = len(list((killed / ".partial").glob("part-*.parquet")))
    assert 1 <= done < parts and set(os.listdir(killed)) == {".partial"}
    assert_one_line(run(*args, killed, "--seed", 1), "holds an unfinished run with other arguments")

    written, right = [], run_folder.RunFolder.write_part
    monkeypatch.setattr(run_folder.RunFolder, "write_part", lambda *a: (written.append(a[1]), right(*a)))
    resumed = run(*args, killed)
    assert resumed.status == 0 and "taking up the unfinished run" in resumed.out
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


def test_an_empty_set_of_questions_is_refused(run, model, task, tmp_path):
    (tmp_path / "parity.py").write_text(PARITY.replace("return [Question", "return [] and [Question"))
    assert_one_line(run(model, "--task", task, "--out", tmp_path / "out", *SHORT), "no questions")
    assert not (tmp_path / "out").exists()


def test_a_chat_template_that_raises_is_one_line(run, model, task, tmp_path):
    folder = save_checkpoint(tmp_path / "chatty", "llama", chat=True)
    (tmp_path / "parity.py").write_text(
        PARITY.replace('Question(f"w{', "Question([{'role': 'user', 'content': 'w4'}] or f\"{")
    )
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no system\n role') }}")
    args = ("--task", task, "--out", tmp_path / "out", *SHORT)
    assert_one_line(run(folder, *args), "the tokenizer's chat template raised TemplateError (no system)")
    (folder / "chat_template.jinja").write_text("{{ messages[0].content / 0 }}")
    assert_one_line(run(folder, *args), "the tokenizer's chat template raised TypeError")


def test_a_run_that_is_refused_keeps_the_finished_one(run, model, task, tmp_path):
    args = (model, "--task", task, "--out", tmp_path / "out", *SHORT)
    assert run(*args).status == 0
    before = contents(tmp_path / "out")
    (tmp_path / "out" / ".partial").write_text("mine")
    assert_one_line(run(*args, "--seed", 1, "--overwrite"), ".partial is a file")
    (tmp_path / "out" / ".partial").unlink()
    (tmp_path / "parity.py").write_text(PARITY.replace("correct = len", "1 / 0; correct = len"))
    assert_one_line(run(*args, "--seed", 1, "--overwrite"), "raised ZeroDivisionError")
    assert {name: text for name, text in contents(tmp_path / "out").items() if ".partial" not in name} == before
    (tmp_path / "parity.py").write_text(PARITY)
    assert "already evaluated" in run(*args).out
    assert "taking up the unfinished run" in run(*args, "--seed", 1).out
    assert set(os.listdir(tmp_path / "out")) == RESULTS and contents(tmp_path / "out") != before


@pytest.mark.parametrize("damage", [Path.unlink, lambda p: p.write_text(""), lambda p: p.write_bytes(b"\xff\0"), None])
def test_a_finished_run_without_its_table_is_one_line(run, model, task, tmp_path, damage):
    args = (model, "--task", task, "--out", tmp_path / "out", *SHORT)
    assert run(*args).status == 0
    junk = [lambda p: p.write_text("a,b\n1,2\n"), lambda p: p.write_text("level,questions,greedy_accuracy\nall,5,x\n")]
    for spoil in [damage] if damage else junk:
        spoil(tmp_path / "out" / "evaluation.csv")
        assert_one_line(run(*args), "evaluation.csv is gone or was changed")
    assert run(*args, "--overwrite").status == 0 and "already evaluated" in run(*args).out


def test_an_adapter_whose_base_changed_is_another_policy(run, model, task, tmp_path):
    """The base is given by a flag, and its weights decide the answers as much as the adapter's own."""
    base, out = Path(shutil.copytree(model, tmp_path / "base")), tmp_path / "out"
    adapter = save_adapter(tmp_path / "adapter", model, r=2, target_modules=["q_proj"])
    args = (adapter, "--base", base, "--task", task, "--out", out, *SHORT)
    assert run(*args).status == 0
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["base_model"]["path"] == str(base) and manifest["params"] == "all"
    assert "already evaluated" in run(*args).out
    save_checkpoint(base, "llama", sharpness=4.0)
    assert_one_line(run(*args), "base_model")
