"""A small storm of faults, of one seed: nothing is lost. `python -m tests.faults` has the large ones."""

from __future__ import annotations

import pytest
from support.processes import Command


def storm(*options: object) -> None:
    ended = Command("-m", "tests.faults", *options).wait()
    assert ended.status == 0, ended.stdout + ended.stderr


def test_no_fault_loses_a_result():
    storm("--storm", 20, "--seed", 0, "--only", "train", "evaluate")


@pytest.mark.all
def test_no_kind_of_fault_loses_a_result_of_any_command():
    storm("--storm", 112, "--seed", 1)
