"""One of several processes is killed in the middle: the others end soon, and all resume to the same numbers."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from support.processes import Command, free_port

from tests.faults.work import make_inputs, words

SOON = 10.0
"""Seconds in which the others end."""
TABLES = {"measure": "tokens.parquet", "diagnose": "data/statistics.csv", "compare": "compare.csv"}
REACHED: dict[str, Callable[[Path], bool]] = {
    "measure": lambda out: any(out.glob(".partial/part-*")),
    "diagnose": lambda out: any(out.glob("*/part-*")) or any(out.glob("**/part-*")),
    "compare": lambda out: any(out.glob(".partial/part-*")),
    "train": lambda out: (out / "metrics.jsonl").exists() and bool((out / "metrics.jsonl").read_text()),
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    make_inputs(folder)
    return folder


def start(command: str, inputs: Path, out: Path, count: int) -> list[Command]:
    line = words(command, inputs, out)
    line += [] if "--device" in line else ["--device", "cpu"]
    line += ["--no-figures"] if command == "measure" else []
    shared = {"WORLD_SIZE": str(count), "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    ranks = range(count)
    return [Command("-m", "gradscope", *line, **shared, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in ranks]


def finish(processes: list[Command]) -> None:
    ended = [process.wait() for process in processes]
    assert [one.status for one in ended] == [0] * len(ended), "\n".join(one.stderr for one in ended)


def read(command: str, out: Path) -> pd.DataFrame:
    """The numbers that a run leaves, but for times."""
    if command != "train":
        file = out / TABLES[command]
        return pd.read_parquet(file) if file.suffix == ".parquet" else pd.read_csv(file)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    found = pd.json_normalize(lines)
    return found[[name for name in found if "second" not in name]]


CASES = [(command, count) for command in REACHED for count in (2, 4)]


@pytest.mark.all
@pytest.mark.parametrize(("command", "count"), CASES)
def test_all_stop_when_one_is_killed_and_resume_to_the_same_numbers(command, count, inputs, tmp_path):
    finish(start(command, inputs, tmp_path / "whole", count))
    out = tmp_path / "killed"
    processes = start(command, inputs, out, count)
    victim = processes.pop(0 if count == 4 else -1)  # the first one holds the others together, and writes
    killed = victim.kill_when(lambda: REACHED[command](out))
    begun = time.monotonic()
    others = [process.wait(60) for process in processes]
    took = time.monotonic() - begun
    assert killed.status == -signal.SIGKILL and [one.status for one in others] == [1] * len(others), took
    assert took < SOON, took
    for one in others:
        assert "another process of this run has ended" in one.stderr and "Traceback" not in one.stderr, one.stderr
    finish(start(command, inputs, out, count))
    pd.testing.assert_frame_equal(read(command, out), read(command, tmp_path / "whole"), check_exact=True)
