"""Who interrupts a command, or reads no further, gets no traceback."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

GRADSCOPE = (sys.executable, "-m", "gradscope")


def test_an_interruption_is_one_line_and_status_130(tmp_path):
    command = [*GRADSCOPE, "demo", "--out", tmp_path / "out"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as running:
        while running.poll() is None and not (tmp_path / "out").exists():
            time.sleep(0.05)
        running.send_signal(signal.SIGINT)
        said = [line for line in running.stderr if line.startswith("gradscope: ")]
    assert running.returncode == 130 and len(said) == 1


def test_what_nobody_reads_ends_without_a_word():
    with subprocess.Popen([*GRADSCOPE, "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        running.stdout.close()
        assert running.stderr.read() == ""
    assert running.returncode == 1
