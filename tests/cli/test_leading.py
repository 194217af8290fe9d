"""A run's folder leads to what lies in it, and a wrong path is refused before a model is loaded."""

from __future__ import annotations

import pytest
from support.cli import refusal
from support.policies import make_policy, make_responses, save_checkpoint, write_jsonl

from gradscope.cli import measuring

FIELDS = ("prompt_ids", "response_ids", "group", "temperature", "reward")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of nine steps with checkpoints at 3, 6 and 9; the rollouts of the tenth step were never sampled."""
    folder = tmp_path_factory.mktemp("run") / "run"
    for step in (3, 6, 9):
        save_checkpoint(folder / f"checkpoint-{step}", "llama")
    rows = [{name: getattr(r, name) for name in FIELDS} for r in make_responses(make_policy("llama"))]
    log = [row | {"step": step, "group": 10 * step + row["group"]} for step in range(1, 10) for row in rows]
    write_jsonl(folder / "gradscope" / "rollouts" / "rollouts.jsonl", log)
    return folder


@pytest.fixture
def unloaded(monkeypatch):
    """No policy is loaded."""

    def load(*_):
        raise AssertionError("a policy is loaded before the paths are checked")

    monkeypatch.setattr(measuring, "load_quietly", load)


@pytest.mark.parametrize("command", ["diagnose", "measure", "compare"])
def test_a_run_in_place_of_a_model_leads_to_a_checkpoint_whose_rollouts_are_logged(run, capsys, unloaded, command):
    log = run / "gradscope" / "rollouts"
    rest = ["--out", run.parent / "out"]
    words = refusal(capsys, command, run, *([] if command == "diagnose" else [log]), *rest)
    # Checkpoint 9 sampled the tenth step's, which is not there.
    assert str(run / "checkpoint-6") in words and str(log) in words and "checkpoint-9" not in words


@pytest.mark.parametrize("command", ["diagnose", "measure", "compare"])
def test_a_run_in_place_of_rollouts_leads_to_its_log(run, capsys, unloaded, command):
    given = ["--rollouts", run] if command == "diagnose" else [run]
    words = refusal(capsys, command, run / "checkpoint-3", *given, "--out", run.parent / "out")
    assert str(run / "gradscope" / "rollouts") in words


@pytest.mark.parametrize("command", ["diagnose", "measure", "compare"])
def test_rollouts_that_are_not_there_are_refused_before_a_model_is_loaded(run, capsys, unloaded, command):
    given = ["--rollouts", "nowhere.jsonl"] if command == "diagnose" else ["nowhere.jsonl"]
    words = refusal(capsys, command, run / "checkpoint-3", *given, "--out", run.parent / "out")
    assert "nowhere.jsonl does not exist" in words


def test_a_command_that_is_nearly_one_is_named(capsys):
    assert "diagnose" in refusal(capsys, "diagnos", "embedded")
