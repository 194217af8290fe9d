"""How commands end that are interrupted, or that nobody reads."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from gradscope.cli import commands

PYTHON = (sys.executable, "-c")


def test_an_interruption_while_the_command_line_is_loaded_is_one_line():
    code = """
import builtins, os, signal
import gradscope.__main__ as start

load = builtins.__import__

def interrupted(name, *args, **settings):
    if name == "tyro":
        os.kill(os.getpid(), signal.SIGINT)
    return load(name, *args, **settings)

builtins.__import__ = interrupted
start.run()
"""
    done = subprocess.run([*PYTHON, code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 130 and len(done.stderr.splitlines()) == 1 and not done.stdout


def test_an_interruption_that_a_library_takes_for_a_broken_import_is_one(monkeypatch, capsys):
    def load(args):
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt as error:
            raise ImportError("transformers has no AutoModelForCausalLM") from error

    monkeypatch.setattr(commands, "_parse", load)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit) as ended:
        commands.main(["measure"])
    assert ended.value.code == 130 and len(capsys.readouterr().err.splitlines()) == 1
    assert signal.getsignal(signal.SIGINT) is before


def test_an_interruption_while_something_is_deleted_is_not_lost(monkeypatch, capsys):
    class Going:
        def __del__(self):
            os.kill(os.getpid(), signal.SIGINT)

    def load(args):
        Going()
        time.sleep(20)

    monkeypatch.setattr(commands, "_parse", load)
    with pytest.raises(SystemExit) as ended:
        commands.main(["measure"])
    assert ended.value.code == 130 and len(capsys.readouterr().err.splitlines()) == 1


def test_work_that_nobody_reads_goes_on_to_its_end(tmp_path):
    code = f"""
from gradscope.cli import go_on_unread

go_on_unread()
for _ in range(10_000):
    print("what head has read enough of")
open({str(tmp_path / "done")!r}, "w").close()
"""
    with subprocess.Popen([*PYTHON, code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        running.stdout.readline()
        running.stdout.close()
        assert running.stderr.read() == "" and running.wait(timeout=60) == 0
    assert (tmp_path / "done").exists()
