"""Two processes diagnose what one diagnoses."""

from __future__ import annotations

import json

from diagnosed import BRIEF, run, write_rows
from test_distributed import launch
from tiny import save_checkpoint


def test_two_processes_write_the_numbers_of_one_for_each_of_several_checkpoints(tmp_path):
    models = [save_checkpoint(tmp_path / f"step-{step}", "qwen2", seed=step) for step in (0, 1)]
    command = ("diagnose", *models, "--rollouts", write_rows(tmp_path / "rollouts.jsonl"), *BRIEF, "--out")
    ended = launch("-m", "gradscope", *command, tmp_path / "two")
    assert [process.status for process in ended] == [0, 0], ended[0].stderr + ended[1].stderr
    run(*command, tmp_path / "one")
    for name in ("step-0/data/statistics.csv", "step-1/data/statistics.csv", "data/trend.csv"):
        assert (tmp_path / "two" / name).read_text() == (tmp_path / "one" / name).read_text(), name
    assert json.loads((tmp_path / "two" / "step-1" / "manifest.json").read_text())["processes"] == 2
    assert (tmp_path / "two" / "report.html").is_file()
