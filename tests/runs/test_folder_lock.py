"""One run at a time in a folder."""

import fcntl

import pytest

from gradscope.errors import InputError
from gradscope.runs import locked


def test_a_lock_that_its_holder_has_just_removed_is_not_taken_for_one(tmp_path, monkeypatch):
    flock, calls = fcntl.flock, []

    def flock_of_a_removed_file(handle, operation):
        if not calls:
            (tmp_path / ".lock").unlink()
        calls.append(operation)
        flock(handle, operation)

    monkeypatch.setattr(fcntl, "flock", flock_of_a_removed_file)
    with locked(tmp_path, ".lock"):
        assert len(calls) == 2
        with pytest.raises(InputError, match="another run"), locked(tmp_path, ".lock"):
            pass
        assert (tmp_path / ".lock").exists()
    assert not (tmp_path / ".lock").exists()


def test_folders_that_were_made_for_the_lock_alone_go_with_it(tmp_path):
    with locked(tmp_path / "a/b", "c/lock"):
        assert (tmp_path / "a/b/c/lock").is_file()
    assert not list(tmp_path.iterdir())
    with locked(tmp_path / "a", "lock"):
        (tmp_path / "a/kept").write_text("")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["kept"]
