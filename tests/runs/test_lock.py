"""One run at a time in a folder."""

from threading import Timer

import pytest

from gradscope.errors import InputError
from gradscope.runs import locked


def test_a_run_that_is_just_ending_is_waited_for(tmp_path, capsys):
    held, ending = locked(tmp_path, ".lock"), Timer(0.05, lambda: held.__exit__(None, None, None))
    held.__enter__()
    with pytest.raises(InputError), locked(tmp_path, ".lock"):
        pass
    ending.start()
    with locked(tmp_path, ".lock"):
        ending.join()
        with pytest.raises(InputError), locked(tmp_path, ".lock"):
            pass
    assert not (tmp_path / ".lock").exists() and capsys.readouterr().err == ""
