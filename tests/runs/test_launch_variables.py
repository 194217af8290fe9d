"""A launcher's variables in a shell where nothing was launched: what they are is said, and how to run alone."""

from __future__ import annotations

import pytest
from support.cli import assert_one_line, outcome_of
from support.policies import make_policy, make_responses, save_checkpoint
from support.processes import Command, free_port
from support.tiers import every

from gradscope import cli
from gradscope.rollouts import collate, write_rollouts
from gradscope.runs import is_first, launched

JOIN = """
import sys
from datetime import timedelta
from gradscope.runs import processes
processes.JOINING, processes.SILENCE = timedelta(seconds=4), 0.5
from gradscope.errors import InputError
from gradscope.policy import join_launch
try:
    join_launch("cpu")
except InputError as error:
    print(error)
    sys.exit(2)
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    model = save_checkpoint(folder / "model", "llama")
    batch = collate(make_responses(make_policy("llama"))[:2])
    return model, write_rollouts(folder / "r.jsonl", batch)


@pytest.mark.all
def test_who_does_not_come_is_counted_after_a_while_and_the_waiting_is_said():
    shared = {"WORLD_SIZE": "3", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    started = [Command("-c", JOIN, **shared, RANK=str(rank)) for rank in (0, 1)]
    ended = [process.wait(90) for process in started]
    assert [process.status for process in ended] == [2, 2]
    assert "2/3" in ended[0].stdout and "WORLD_SIZE=3" in ended[0].stdout and "env -u WORLD_SIZE" in ended[0].stdout
    assert "WORLD_SIZE" in ended[0].stderr and "env -u WORLD_SIZE" in ended[0].stderr


@pytest.mark.parametrize(
    "variables",
    every(
        2,
        [
            {"WORLD_SIZE": "2", "RANK": "0"},
            {"WORLD_SIZE": "two"},
            {"WORLD_SIZE": "0"},
            {"WORLD_SIZE": "2", "RANK": "x"},
        ],
    ),
)
def test_one_line_names_the_variable_and_how_to_run_alone(job, tmp_path, capsys, monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for gone in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(gone, raising=False)
    ended = outcome_of(capsys, "measure", *job, "--out", tmp_path / "out", "--device", "cpu", "--no-figures")
    assert_one_line(ended, "env -u WORLD_SIZE")
    assert next(iter(variables)) in ended.err or "RANK" in ended.err


@pytest.mark.parametrize("variables", [{"WORLD_SIZE": ""}, {"WORLD_SIZE": "1", "RANK": ""}, {"RANK": "1"}])
def test_variables_that_launch_nothing_change_nothing(job, tmp_path, capsys, monkeypatch, variables):
    monkeypatch.setattr("time.sleep", lambda _: None)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert launched() == 1 and is_first()
    cli.main(["measure", *map(str, job), "--out", str(tmp_path / "out"), "--device", "cpu", "--no-figures"])
    capsys.readouterr()
    ended = outcome_of(capsys, "measure", job[0], tmp_path / "none.jsonl", "--out", tmp_path / "other")
    assert_one_line(ended, "none.jsonl")  # also where a rank other than the first is set
