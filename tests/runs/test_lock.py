"""One run at a time in a folder."""

from threading import Timer

import pytest

from gradscope.errors import InputError
from gradscope.runs import locked


def test_a_run_that_is_just_ending_is_waited_for(tmp_path):
    held, ending = locked(tmp_path, ".lock"), Timer(0.05, lambda: held.__exit__(None, None, None))
    held.__enter__()
    with pytest.raises(InputError), locked(tmp_path, ".lock"):
        pass
    ending.start()
    with locked(tmp_path, ".lock"):
        ending.join()
        with pytest.raises(InputError), locked(tmp_path, ".lock"):
            pass
    assert not (tmp_path / ".lock").exists()


def test_folders_that_were_made_for_the_lock_alone_go_with_it(tmp_path):
    with locked(tmp_path / "a/b", "c/lock"):
        assert (tmp_path / "a/b/c/lock").is_file()
    assert not list(tmp_path.iterdir())
    with locked(tmp_path / "a", "lock"):
        (tmp_path / "a/kept").write_text("")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["kept"]
