"""Whenever a command is killed or its disk is full, the same command goes on to the same files."""

from __future__ import annotations

import shutil
import signal
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from support.processes import Command, Ended

from tests.faults.work import COMMANDS, contents, make_inputs, words

LIMITED = """
import resource, runpy, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv.pop(1)), resource.RLIM_INFINITY))
runpy.run_module("gradscope", run_name="__main__", alter_sys=True)
"""
"""A command on a disk that has room for files of so many bytes, which what it says on stderr needs, too."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    make_inputs(folder)
    return folder


def run(command: str, inputs: Path, out: Path) -> Ended:
    return Command("-m", "gradscope", *words(command, inputs, out)).wait()


def kill_after(seconds: float, command: str, inputs: Path, out: Path) -> None:
    ended = Command("-m", "gradscope", *words(command, inputs, out)).kill_after(seconds)
    assert ended.status in (0, -signal.SIGKILL), ended.stderr


def fill(size: int, command: str, inputs: Path, out: Path) -> None:
    ended = Command("-c", LIMITED, size, *words(command, inputs, out)).wait()
    assert ended.status in (0, 1) and "Traceback" not in ended.stderr, ended.stderr
    assert ended.status == 0 or ended.stderr.splitlines()[-1].startswith("gradscope: ")


FAULTS = st.lists(st.tuples(st.sampled_from(["kill", "full"]), st.floats(0, 1)), min_size=1, max_size=2)


@pytest.mark.all
@pytest.mark.parametrize("command", COMMANDS)
def test_the_same_command_goes_on_to_the_same_files(command, inputs, tmp_path):
    out, begun = tmp_path / "out", time.monotonic()
    ended = run(command, inputs, out)
    took = time.monotonic() - begun
    assert ended.status == 0, ended.stderr
    whole = contents(out)
    largest = max(file.stat().st_size for file in out.rglob("*") if file.is_file())

    few = 3 if command == "diagnose" else 6  # the dearest

    @settings(max_examples=few, database=None, deadline=None, derandomize=True, suppress_health_check=[*HealthCheck])
    @given(faults=FAULTS)
    def check(faults: list[tuple[str, float]]) -> None:
        shutil.rmtree(out, ignore_errors=True)
        for kind, share in faults:
            if kind == "kill":
                kill_after(share * took, command, inputs, out)
            else:
                fill(2000 + int(share * largest), command, inputs, out)
        ended = run(command, inputs, out)
        assert ended.status == 0, ended.stderr
        assert contents(out) == whole

    check()
