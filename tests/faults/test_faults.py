"""A small storm of faults, of one seed: nothing is lost. `python -m tests.faults` has the large ones."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from support.processes import Command

from tests.faults.work import COMMANDS


def storm(*options: object) -> None:
    ended = Command("-m", "tests.faults", *options).wait()
    assert ended.status == 0, ended.stdout + ended.stderr


def test_the_table_holds_hundreds_of_faults_of_every_command_and_none_lost():
    table = pd.read_csv(Path(__file__).with_name("storm.csv"), comment="#").set_index("command")
    whole = table.drop("all")
    assert set(whole.index) == set(COMMANDS) and whole["kind"].nunique() >= 16
    assert table.loc["all", "faults"] == whole["faults"].sum() >= 800 and (whole["LOST"] == 0).all()
    assert (whole["faults"] == whole[["same", "refused", "left"]].sum(axis=1)).all()


# A tenth of the table's; diagnose, the dearest, is among those below.
FEW = {"measure": 4, "compare": 9, "evaluate": 48, "train": 15, "reproduce": 15}


@pytest.mark.parametrize("command", FEW)
def test_no_fault_loses_a_result(command):
    storm("--storm", FEW[command], "--seed", 0, "--only", command)


@pytest.mark.all
def test_no_kind_of_fault_loses_a_result_of_any_command():
    storm("--storm", 112, "--seed", 1)
