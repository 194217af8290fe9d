"""Who interrupts a command, or reads no further, gets no traceback."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

GRADSCOPE = (sys.executable, "-m", "gradscope")


@pytest.mark.all
def test_an_interruption_is_one_line_and_status_130(tmp_path):
    command = [*GRADSCOPE, "demo", "--out", tmp_path / "out"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as running:
        while running.poll() is None and not (tmp_path / "out").exists():
            time.sleep(0.05)
        running.send_signal(signal.SIGINT)
        said = [line for line in running.stderr if line.startswith("gradscope: ")]
    assert running.returncode == 130 and len(said) == 1


SWALLOWED = "try:\n    signal.raise_signal(signal.SIGINT)\nexcept BaseException:\n    pass\n"
IN_TEXT = "exec('signal.raise_signal(signal.SIGINT)')\n"
"""Whose KeyboardInterrupt Python remembers as one that nobody caught."""


@pytest.mark.all
@pytest.mark.parametrize(("imported", "asked"), [(SWALLOWED, ""), (IN_TEXT, ""), ("", IN_TEXT)])
def test_an_interruption_in_whatever_code_is_one_line_and_status_130(tmp_path, imported, asked):
    task = tmp_path / "task.py"
    task.write_text(
        f"import signal\nfrom gradscope.tasks import Question, register\n{imported}\n"
        "class Own:\n"
        "    name = 'own'\n"
        "    def questions(self, n, *, seed, **options):\n"
        f"        {asked}\n"
        "        return [Question('1', 1)] * n\n"
        "    def reward(self, response, question):\n"
        "        return 1.0\n"
        "register(Own())\n"
    )
    command = [*GRADSCOPE, "sample", "embedded", "--task", f"{task}:own", "--out", tmp_path / "out.jsonl"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 130 and len(done.stderr.splitlines()) == 1, done.stderr


def test_what_nobody_reads_ends_without_a_word():
    with subprocess.Popen([*GRADSCOPE, "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        running.stdout.close()
        assert running.stderr.read() == ""
    assert running.returncode == 1
