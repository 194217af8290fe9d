"""A terminal or a file whose encoding lacks some of the characters: they are replaced, and nothing fails."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from support.policies import make_policy, make_responses, save_checkpoint

from gradscope.rollouts import collate, write_rollouts


@pytest.mark.all
@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "latin-1"])
def test_every_output_is_written(tmp_path, encoding):
    model = save_checkpoint(tmp_path / "checkpoint-1", "llama")
    log = write_rollouts(tmp_path / "r.jsonl", collate(make_responses(make_policy("llama"))))
    diagnose = ("diagnose", model, "--rollouts", log, "--minutes", "0.05", "--no-compare", "--out", tmp_path / "out")
    env = os.environ | {"PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"}
    missing = ("measure", model, tmp_path / "‖−…", "--out", tmp_path / "no")
    for command, status in ((("measure", "--help"), 0), (diagnose, 0), (missing, 2)):
        done = subprocess.run(
            [sys.executable, "-m", "gradscope", *map(str, command)], env=env, capture_output=True, check=False
        )
        assert done.returncode == status, done.stderr
        assert b"Traceback" not in done.stderr and (done.stdout or done.stderr)
        done.stdout.decode(encoding)
    assert (tmp_path / "out" / "report.html").is_file()
