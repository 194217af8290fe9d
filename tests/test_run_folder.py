"""A run's folder: whole or not at all, taken up again, and never in the way of what somebody else put there."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pandas as pd
import pytest

from gradscope import run_folder
from gradscope.errors import InputError
from gradscope.run_folder import RunFolder, file_hash, write_json, write_parquet, write_text

KEY = {"model": "0" * 64, "settings": {"seed": 0, "temperature": None, "loss": {"kl_coef": 0.001}}}
OTHER = {"model": "0" * 64, "settings": {"seed": 1, "temperature": None, "loss": {"kl_coef": 0.001}}}
FRAME = pd.DataFrame({"token": ["a", "b"], "logprob": [-1.0, -2.0]})


def finish(folder: RunFolder) -> None:
    write_parquet(folder.staged / "tokens.parquet", FRAME)
    write_text(folder.staged / "summary.txt", "done")
    folder.close({"seed": 0})


def contents(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


def refusal(folder: RunFolder, **settings) -> str:
    before = contents(folder.folder)
    for ask in (folder.look, folder.open):
        with pytest.raises(InputError) as caught:
            ask(**settings)
        assert "\n" not in str(caught.value) and contents(folder.folder) == before
    return str(caught.value)


def test_looking_writes_nothing_and_opening_makes_an_unfinished_run(tmp_path):
    folder = RunFolder(tmp_path / "a" / "b", KEY)
    assert folder.look() == "nothing" and not (tmp_path / "a").exists()
    assert folder.open() is False
    assert folder.look() == "unfinished" and set(contents(tmp_path)) == {"a/b/.partial/key.json"}


def test_an_unfinished_run_of_the_same_key_keeps_its_parts_and_drops_what_was_staged(tmp_path):
    folder = RunFolder(tmp_path, KEY)
    folder.open()
    folder.write_part(0, FRAME)
    write_text(folder.staged / "half a figure.txt", "…")
    again = RunFolder(tmp_path, dict(reversed(KEY.items())))
    assert again.open() is True
    assert again.part(0).is_file() and not again.part(1).is_file() and not any(again.staged.iterdir())
    pd.testing.assert_frame_equal(again.read_parts(1)[0], FRAME)


def test_a_response_without_tokens_is_a_part_too(tmp_path):
    folder = RunFolder(tmp_path, KEY)
    folder.open()
    folder.write_part(0, pd.DataFrame())
    assert len(folder.read_parts(1)[0]) == 0


def test_closing_puts_everything_in_place_and_leaves_nothing_else(tmp_path):
    folder = RunFolder(tmp_path, KEY)
    folder.open()
    folder.write_part(0, FRAME)
    (folder.staged / "figures").mkdir()
    write_text(folder.staged / "figures" / "one.csv", "1")
    finish(folder)
    assert set(contents(tmp_path)) == {"figures/one.csv", "manifest.json", "summary.txt", "tokens.parquet"}
    assert not folder.partial.exists() and folder.look() == "finished"
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest == {"seed": 0, "files": ["figures/one.csv", "summary.txt", "tokens.parquet"], "key": KEY}
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "tokens.parquet"), FRAME)


def test_something_may_be_added_to_a_finished_run(tmp_path):
    folder = RunFolder(tmp_path, KEY)
    folder.open()
    finish(folder)
    folder.stage()
    write_text(folder.staged / "more.txt", "more")
    assert folder.look() == "finished"  # killed here, it is still what it was
    folder.close(folder.manifest)
    assert folder.manifest["files"] == ["summary.txt", "tokens.parquet", "more.txt"] and folder.look() == "finished"


def test_killed_between_table_and_manifest_the_run_is_unfinished(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path, KEY)
    folder.open()
    folder.write_part(0, FRAME)
    with monkeypatch.context() as patch:
        patch.setattr(run_folder, "write_json", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            finish(folder)
    assert (tmp_path / "tokens.parquet").is_file() and not (tmp_path / "manifest.json").exists()
    assert folder.look() == "unfinished" and folder.open() is True and folder.part(0).is_file()
    finish(folder)
    assert folder.look() == "finished"


@pytest.mark.parametrize("finished", [True, False])
def test_a_run_with_other_arguments_is_refused_with_what_differs(tmp_path, finished):
    folder = RunFolder(tmp_path, KEY)
    folder.open()
    folder.write_part(0, FRAME)
    if finished:
        finish(folder)
    message = refusal(RunFolder(tmp_path, OTHER))
    assert ("unfinished" in message) is not finished
    assert "seed 0, not 1" in message and "kl_coef" not in message and "--overwrite" in message


def test_a_difference_in_a_hash_is_told_by_its_first_digits(tmp_path):
    RunFolder(tmp_path, KEY).open()
    assert "model 00000000…, not 11111111…" in refusal(RunFolder(tmp_path, KEY | {"model": "1" * 64}))


def test_overwriting_takes_away_what_a_run_wrote_and_nothing_else(tmp_path):
    write_text(tmp_path / "notes.txt", "mine")
    folder = RunFolder(tmp_path, KEY)
    folder.open()
    finish(folder)
    write_text(tmp_path / "more.txt", "mine too")
    other = RunFolder(tmp_path, OTHER)
    assert other.look(overwrite=True) == "nothing" and folder.look() == "finished"
    assert other.open(overwrite=True) is False
    assert set(contents(tmp_path)) == {".partial/key.json", "more.txt", "notes.txt"}
    other.write_part(0, FRAME)
    assert other.open(overwrite=True) is False and not other.part(0).exists()  # the same key starts anew too


def test_a_folder_with_other_peoples_files_keeps_them(tmp_path):
    write_text(tmp_path / "notes.txt", "mine")
    folder = RunFolder(tmp_path, KEY)
    folder.open()
    finish(folder)
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("name", ["tokens.parquet", "figures"])
def test_results_without_a_manifest_are_not_touched(tmp_path, name):
    if name == "figures":
        (tmp_path / name).mkdir()
        write_text(tmp_path / name / "mine.png", "mine")
    else:
        write_text(tmp_path / name, "mine")
    assert f"holds {name} without a manifest" in refusal(RunFolder(tmp_path, KEY))


@pytest.mark.parametrize("text", ["{}", "[]", '"x"', "{", '{"name": "a web page"}', "\x00"])
def test_a_manifest_that_is_not_a_runs_is_never_replaced(tmp_path, text):
    write_text(tmp_path / "manifest.json", text)
    assert "is not of a run" in refusal(RunFolder(tmp_path, KEY))
    assert "is not of a run" in refusal(RunFolder(tmp_path, KEY), overwrite=True)


def test_an_unreadable_key_is_another_run(tmp_path):
    folder = RunFolder(tmp_path, KEY)
    folder.open()
    (folder.partial / "key.json").write_bytes(b"\xff{")
    assert "holds an unfinished run" in refusal(folder)
    assert folder.open(overwrite=True) is False


def test_a_file_in_the_place_of_the_folder_or_above_it_is_refused(tmp_path):
    write_text(tmp_path / "file", "mine")
    for path in (tmp_path / "file", tmp_path / "file" / "deeper" / "still"):
        assert f"{tmp_path / 'file'} is a file" in refusal(RunFolder(path, KEY))
        assert f"{tmp_path / 'file'} is a file" in refusal(RunFolder(path, KEY), overwrite=True)


def test_a_write_that_fails_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    write_parquet(tmp_path / "t.parquet", FRAME)
    write_json(tmp_path / "m.json", {"a": 1})
    before = {name: (tmp_path / name).read_bytes() for name in ("t.parquet", "m.json")}

    def fail(path, *_args, **_settings):
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pd.DataFrame, "to_parquet", lambda _frame, path, **_settings: fail(path))
    monkeypatch.setattr(Path, "write_text", lambda path, *_args, **_settings: path.write_bytes(b"half") and fail(path))
    for write in (
        lambda: write_parquet(tmp_path / "t.parquet", FRAME),
        lambda: write_json(tmp_path / "m.json", {"a": 2}),
    ):
        with pytest.raises(OSError, match="No space"):
            write()
    assert {name: (tmp_path / name).read_bytes() for name in before} == before


def test_the_hash_of_a_file_is_its_sha256(tmp_path):
    write_text(tmp_path / "file", "abc" * 10**5)
    assert file_hash(tmp_path / "file") == hashlib.sha256(b"abc" * 10**5).hexdigest()
