"""Results that an earlier reader made of a log are named when they are met again, and nothing goes on from them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from support import dumps
from support.cli import refusal, run
from support.pages import BRIEF, read_page
from support.policies import save_checkpoint
from support.tiers import every

from gradscope.diagnosis import diagnose
from gradscope.errors import InputError
from gradscope.policy import load_policy
from gradscope.rollouts import READER, READERS, read_dump

pytestmark = pytest.mark.usefixtures("undrawn")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("run") / "checkpoint-2", "qwen2")


@pytest.fixture
def log(tmp_path) -> Path:
    return dumps.write_open_instruct(tmp_path / "log")


@pytest.fixture
def lone(monkeypatch) -> Iterator[pytest.MonkeyPatch]:
    """A reader that takes every response for a group of its own."""
    own = READERS["open_instruct"]

    def rows(records, policy):
        for number, row in enumerate(own.rows(records, policy)):
            yield replace(row, columns=row.columns | {"group": number})

    with monkeypatch.context() as patch:
        patch.setitem(READERS, "open_instruct", replace(own, rows=rows))
        yield patch


def groups(log: Path) -> str:
    """What is said of the folder: how many groups there were, and are."""
    dump = read_dump(log)
    return f"saw {len(dump.batch)} groups of responses, not {len(dump.batch.group_ids.unique())}"


@pytest.mark.parametrize("command", every(3, ["measure", "diagnose", "compare"]))
def test_a_folder_that_another_reader_made_is_refused_until_it_is_overwritten(
    command, model, log, lone, tmp_path, capsys
):
    given = (model, "--rollouts", log) if command == "diagnose" else (model, log)
    brief = {"diagnose": BRIEF, "measure": ("--no-figures",), "compare": ("--weightings", "reweight")}[command]
    run(command, *given, *brief, "--out", tmp_path / "out")
    kept = (tmp_path / "out" / "tokens.parquet").read_bytes()
    lone.undo()
    assert groups(log) in refusal(capsys, command, *given, *brief, "--out", tmp_path / "out")
    assert (tmp_path / "out" / "tokens.parquet").read_bytes() == kept
    run(command, *given, *brief, "--out", tmp_path / "out", "--overwrite")
    table = pd.read_parquet(tmp_path / "out" / "tokens.parquet")
    assert table["group"].nunique() == len(read_dump(log).batch.group_ids.unique())
    run(command, *given, *brief, "--out", tmp_path / "out")  # which goes on from its own


@pytest.mark.all
def test_a_trend_names_it_too(model, log, lone, tmp_path, capsys):
    other = save_checkpoint(tmp_path / "checkpoint-4", "qwen2", seed=1)
    trend = ("diagnose", model, other, "--rollouts", log, *BRIEF, "--out", tmp_path / "trend")
    run(*trend)
    lone.undo()
    assert groups(log) in refusal(capsys, *trend)


@pytest.mark.all
def test_the_page_says_which_reader_it_was(model, log, tmp_path):
    run("diagnose", model, "--rollouts", log, *BRIEF, "--out", tmp_path / "out")
    assert f"(open_instruct, reader {READER})" in read_page(tmp_path / "out").text
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["rollouts"]["reader"] == READER


def test_a_table_of_other_groups_is_no_table_of_the_batch(model, log, lone):
    policy = load_policy(model)
    from gradscope.gradients import measure

    table = measure(policy, read_dump(log, policy).batch, self_check=False)
    lone.undo()
    batch = read_dump(log, policy).batch
    with pytest.raises(InputError, match=groups(log)):
        diagnose(policy, batch, table)
