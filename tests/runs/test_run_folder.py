"""A run's folder: whole or not at all, taken up again, and never in the way of what somebody else put there."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from pyarrow.parquet import ParquetFile
from support.refusals import refused

from gradscope.errors import InputError
from gradscope.runs import (
    RunFolder,
    check_writable,
    folder as run_folder,
    replacing,
    write_json,
    write_parquet,
    write_parquet_parts,
    write_text,
)

KEY = {"model": "0" * 64, "settings": {"seed": 0, "temperature": None, "loss": {"kl_coef": 0.001}}}
OTHER = {"model": "0" * 64, "settings": {"seed": 1, "temperature": None, "loss": {"kl_coef": 0.001}}}
FRAME = pd.DataFrame({"token": ["a", "b"], "logprob": [-1.0, -2.0]})


def finish(folder: RunFolder) -> None:
    write_parquet(folder.staged / "tokens.parquet", FRAME)
    write_text(folder.staged / "summary.txt", "done")
    folder.publish({"seed": 0})


def begin(path: Path) -> RunFolder:
    """An unfinished run with one part."""
    folder = RunFolder(path, KEY)
    folder.begin()
    folder.write_part(0, FRAME)
    return folder


def contents(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


def refusal(folder: RunFolder, **settings) -> str:
    before = contents(folder.folder)
    for ask in (folder.status, folder.begin):
        with pytest.raises(InputError) as caught:
            ask(**settings)
        assert contents(folder.folder) == before
    return str(caught.value)


def test_looking_writes_nothing_and_opening_makes_an_unfinished_run(tmp_path):
    folder = RunFolder(tmp_path / "a" / "b", KEY)
    assert folder.status() == "nothing" and not (tmp_path / "a").exists()
    assert folder.begin() is False
    assert folder.status() == "nothing" and set(contents(tmp_path)) == {"a/b/.partial/key.json"}
    folder.write_part(0, FRAME)
    assert folder.status() == "unfinished"


def test_an_unfinished_run_of_the_same_key_keeps_its_parts_and_drops_what_was_staged(tmp_path):
    folder = RunFolder(tmp_path, KEY)
    folder.begin()
    folder.write_part(0, FRAME)
    write_text(folder.staged / "half a figure.txt", "…")
    again = RunFolder(tmp_path, dict(reversed(KEY.items())))
    assert again.begin() is True
    assert again.part(0).is_file() and not again.part(1).is_file() and not any(again.staged.iterdir())
    pd.testing.assert_frame_equal(again.read_part(0), FRAME)


def test_closing_puts_everything_in_place_and_leaves_nothing_else(tmp_path):
    folder = RunFolder(tmp_path, KEY)
    folder.begin()
    folder.write_part(0, FRAME)
    (folder.staged / "figures").mkdir()
    write_text(folder.staged / "figures" / "one.csv", "1")
    finish(folder)
    assert set(contents(tmp_path)) == {"figures/one.csv", "manifest.json", "summary.txt", "tokens.parquet"}
    assert not folder.partial.exists() and folder.status() == "finished"
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest == {"seed": 0, "files": ["figures/one.csv", "summary.txt", "tokens.parquet"], "key": KEY}
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "tokens.parquet"), FRAME)


def test_killed_between_table_and_manifest_the_run_is_unfinished(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path, KEY)
    folder.begin()
    folder.write_part(0, FRAME)
    with monkeypatch.context() as patch:
        patch.setattr(run_folder, "write_json", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            finish(folder)
    assert (tmp_path / "tokens.parquet").is_file() and not (tmp_path / "manifest.json").exists()
    assert folder.status() == "unfinished" and folder.begin() is True and folder.part(0).is_file()
    finish(folder)
    assert folder.status() == "finished"


@pytest.mark.parametrize("finished", [True, False])
def test_a_run_with_other_arguments_is_refused_with_what_differs(tmp_path, finished):
    folder = RunFolder(tmp_path, KEY)
    folder.begin()
    folder.write_part(0, FRAME)
    if finished:
        finish(folder)
    message = refusal(RunFolder(tmp_path, OTHER))
    assert ("unfinished" in message) is not finished
    assert "seed 0, not 1" in message and "kl_coef" not in message and "--overwrite" in message


@pytest.mark.parametrize("finished", [True, False])
def test_a_setting_that_an_earlier_version_did_not_have_counts_as_its_default(tmp_path, finished):
    before = contents(begin(tmp_path).folder)
    if finished:
        finish(RunFolder(tmp_path, KEY))

    def newer(estimator: str) -> RunFolder:
        key = KEY | {"settings": KEY["settings"] | {"loss": {"kl_coef": 0.001, "kl_estimator": estimator}, "new": None}}
        return RunFolder(tmp_path, key, defaults={"settings": {"loss": {"kl_estimator": "k3", "gone": 5}}})

    assert "kl_estimator k3, not k1" in refusal(newer("k1"))
    folder = newer("k3")
    assert folder.status() == ("finished" if finished else "unfinished")
    if not finished:
        assert contents(tmp_path) == before and folder.begin() and folder.has_part(0)
        finish(folder)
        assert folder.manifest["key"] == folder.key and folder.status() == "finished"


def test_overwriting_takes_away_what_a_run_wrote_and_nothing_else(tmp_path):
    write_text(tmp_path / "notes.txt", "mine")
    folder = RunFolder(tmp_path, KEY)
    folder.begin()
    finish(folder)
    write_text(tmp_path / "more.txt", "mine too")
    other = RunFolder(tmp_path, OTHER)
    assert other.status(overwrite=True) == "nothing" and folder.status() == "finished"
    assert other.begin(overwrite=True) is False and folder.status() == "finished"  # until there is something else
    other.write_part(0, FRAME)
    assert other.begin(overwrite=True) is False and not other.part(0).exists()  # the same key starts anew too
    write_text(other.staged / "tokens.parquet", "other")
    other.publish({})
    assert set(contents(tmp_path)) == {"tokens.parquet", "manifest.json", "more.txt", "notes.txt"}
    assert other.status() == "finished" and (tmp_path / "tokens.parquet").read_text() == "other"


def test_killed_while_results_are_replaced_the_new_run_is_unfinished(tmp_path, monkeypatch):
    finish(begin(tmp_path))
    other = RunFolder(tmp_path, OTHER)
    other.begin(overwrite=True)
    other.write_part(0, FRAME)
    with monkeypatch.context() as patch:
        patch.setattr(run_folder, "write_json", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            finish(other)
    assert "holds an unfinished run" in refusal(RunFolder(tmp_path, KEY))  # not its own results any more
    assert other.status() == "unfinished" and other.begin() is True and other.has_part(0)


@pytest.mark.parametrize("name", ["tokens.parquet", "figures"])
def test_results_without_a_manifest_are_not_touched(tmp_path, name):
    if name == "figures":
        (tmp_path / name).mkdir()
        write_text(tmp_path / name / "mine.png", "mine")
    else:
        write_text(tmp_path / name, "mine")
    assert f"holds {name} without a manifest" in refusal(RunFolder(tmp_path, KEY))


NOT_A_RUNS = ["{}", "[]", '"x"', "{", '{"name": "a web page"}', "\x00", '{"key": []}', '{"key": null, "files": []}']
NOT_A_RUNS += ['{"key": {}, "files": null}', '{"key": {}, "files": [5]}', '{"key": {}, "files": ["../mine"]}']


@pytest.mark.parametrize("content", NOT_A_RUNS)
def test_a_manifest_of_something_else_is_never_replaced(tmp_path, content):
    (tmp_path / "manifest.json").write_text(content)
    for overwrite in (False, True):
        refusal(RunFolder(tmp_path, KEY), overwrite=overwrite)


def test_a_part_that_cannot_be_read_is_named(tmp_path):
    folder = begin(tmp_path)
    assert folder.has_part(0) and not folder.has_part(1)
    folder.part(0).write_bytes(folder.part(0).read_bytes()[:50])
    with refused("part-000000"):
        folder.read_part(0)


def test_a_result_that_is_gone_is_told_of_and_files_are_added_to_a_finished_run(tmp_path):
    folder = begin(tmp_path)
    finish(folder)
    folder.check("tokens.parquet")
    folder.stage()
    write_text(folder.staged / "more.txt", "more")
    folder.publish(folder.manifest)
    assert folder.manifest["files"] == ["summary.txt", "tokens.parquet", "more.txt"]
    (tmp_path / "tokens.parquet").unlink()
    with pytest.raises(InputError):
        folder.check("tokens.parquet")


# Who writes.


def test_one_run_writes_at_a_time(tmp_path):
    folder, other = RunFolder(tmp_path, KEY), RunFolder(tmp_path, OTHER)
    with folder.writing(), refused(tmp_path), other.writing():
        pass
    with other.writing():
        pass


def test_a_killed_run_holds_nothing_back(tmp_path):
    code = f"import os; from gradscope.runs import RunFolder; w = RunFolder({str(tmp_path)!r}, {{}}).writing()"
    code += "; w.__enter__(); print('in', flush=True); os.kill(os.getpid(), 9)"
    process = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=False)
    assert (process.returncode, process.stdout) == (-9, b"in\n") and (tmp_path / ".lock").is_file()
    with RunFolder(tmp_path, KEY).writing():
        pass
    assert not tmp_path.exists()


@pytest.mark.parametrize(
    ("code", "kind"), [(errno.ENOSPC, OSError), (errno.EFBIG, OSError), (errno.EACCES, InputError)]
)
def test_what_cannot_be_written_halfway_names_the_file_and_keeps_what_there_is(code, kind, tmp_path, monkeypatch):
    folder = begin(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(pd.DataFrame, "to_parquet", lambda *_, **__: (_ for _ in ()).throw(OSError(code, "no")))
        with pytest.raises((OSError, InputError)) as raised, folder.writing():
            folder.write_part(1, FRAME)
    assert type(raised.value) is kind and str(folder.part(1)) in str(raised.value)
    assert folder.status() == "unfinished" and folder.has_part(0) and not folder.has_part(1)


def test_an_error_with_another_file_is_not_the_folders(tmp_path):
    with pytest.raises(FileNotFoundError), RunFolder(tmp_path / "out", KEY).writing():
        (tmp_path / "rollouts.jsonl").read_text()


@pytest.mark.filterwarnings("ignore:flock not supported:UserWarning")
def test_a_file_system_without_locks_is_written_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSYS, "no such call")))
    with RunFolder(tmp_path, KEY).writing():
        pass


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs a folder where nobody may write")
def test_what_cannot_be_written_is_refused_with_what_to_do(tmp_path):
    for path in (Path("/proc/a"), Path("/proc/a/b"), tmp_path / ("a" * 300)):
        with pytest.raises(InputError):
            RunFolder(path, KEY).begin()
        with pytest.raises(InputError), RunFolder(path, KEY).writing():
            pass
    check_writable(tmp_path / "deep" / "er" / "file")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_is_replaced_stays_as_it_was_until_the_whole_is_there(tmp_path, kind):
    def write(path: Path, text: str) -> None:
        if kind == "folder":
            path.mkdir()
        (path / "inside" if kind == "folder" else path).write_text(text)

    target = tmp_path / "target"
    write(target, "old")
    before = contents(tmp_path)
    with pytest.raises(ZeroDivisionError), replacing(target) as partial:
        write(partial, "half")
        raise ZeroDivisionError
    assert contents(tmp_path) == before
    write(partial, "left by a killed run")
    with replacing(target) as partial:
        write(partial, "new")
    assert {*contents(tmp_path).values()} == {b"new"} and contents(tmp_path).keys() == before.keys()


def test_tables_and_objects_are_written_so(tmp_path):
    write_json(tmp_path / "m.json", {"a": (1.0, float("nan"))})
    with pytest.raises(TypeError):
        write_json(tmp_path / "m.json", {("a",): 2})
    assert json.loads((tmp_path / "m.json").read_text()) == {"a": [1.0, None]}
    write_parquet(tmp_path / "t.parquet", FRAME)
    with pytest.raises(ValueError):
        write_parquet(tmp_path / "t.parquet", pd.DataFrame([[1, 2]], columns=["a", "a"]))
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "t.parquet"), FRAME)
    assert sorted(os.listdir(tmp_path)) == ["m.json", "t.parquet"]


def test_a_table_in_parts_is_that_of_all_frames_in_groups_of_rows(tmp_path):
    size, path = 40_000, tmp_path / "t.parquet"
    frames = [FRAME.iloc[:0], *(FRAME.sample(size, replace=True, random_state=n) for n in range(5)), pd.DataFrame()]
    write_parquet_parts(path, frames)
    pd.testing.assert_frame_equal(pd.read_parquet(path), pd.concat(frames[1:-1], ignore_index=True))
    assert 1 < ParquetFile(path).metadata.num_row_groups < 5
    before = contents(tmp_path)
    with pytest.raises(ZeroDivisionError):
        write_parquet_parts(path, (frames[1].iloc[: size // n] for n in (1, 1, 1, 0)))  # the first group is written
    assert contents(tmp_path) == before
