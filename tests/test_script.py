"""Scripts end with one line where the input is at fault."""

import pandas as pd
import pytest

from analyses.script import exit_with
from analyses.tables import write_csv
from gradscope.errors import InputError


@pytest.mark.parametrize(("status", "code"), [(None, None), (0, 0), (2, 2)])
def test_a_script_exits_with_the_status_it_returns(status, code):
    with pytest.raises(SystemExit) as ended:
        exit_with(lambda: status)
    assert ended.value.code == code


def test_an_input_at_fault_is_one_line_and_status_2(capsys):
    def refuse():
        raise InputError("no scale is called 'nano'; give one of cpu, gpu")

    with pytest.raises(SystemExit) as ended:
        exit_with(refuse)
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: no scale is called 'nano'; give one of cpu, gpu\n"


def test_a_folder_that_cannot_be_written_is_one_line_and_status_2(tmp_path, capsys):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as ended:
        exit_with(lambda: write_csv(pd.DataFrame({"a": [1]}), tmp_path / "file" / "table.csv"))
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and str(tmp_path / "file") in said and said.count("\n") == 1


def test_any_other_error_flies():
    with pytest.raises(ZeroDivisionError):
        exit_with(lambda: 1 // 0)
