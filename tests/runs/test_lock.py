"""One run at a time in a folder."""

import pytest

from gradscope.errors import InputError
from gradscope.runs import locked


def test_a_second_run_is_refused_until_the_first_has_ended(tmp_path):
    with locked(tmp_path):
        with pytest.raises(InputError), locked(tmp_path):
            pass
        with pytest.raises(InputError), locked(tmp_path):  # who was refused has not taken the first one's lock away
            pass
    with locked(tmp_path):
        pass
    assert not tmp_path.exists()  # nothing was written
