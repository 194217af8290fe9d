"""Scripts end with one line where the input is at fault."""

import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from analyses.common.script import exit_with
from analyses.common.tables import write_csv
from gradscope.errors import InputError

REPOSITORY = Path(__file__).parents[2]


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


def test_an_interruption_is_one_line_and_status_130(capsys):
    with pytest.raises(SystemExit) as ended:
        exit_with(lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    assert ended.value.code == 130 and capsys.readouterr().err.count("\n") == 1


def test_a_folder_that_cannot_be_written_is_one_line_and_status_2(tmp_path, capsys):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as ended:
        exit_with(lambda: write_csv(pd.DataFrame({"a": [1]}), tmp_path / "file" / "table.csv"))
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and str(tmp_path / "file") in said and said.count("\n") == 1


WAITS = """
import sys, time
from analyses.common.script import end_with
end_with(int(sys.argv[1]))
print("waits", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("reaped", [True, False])
def test_a_process_ends_with_the_one_it_is_to_end_with(reaped):
    """By its number, another than its own parent's; one that was killed and that nobody has asked after is gone too."""
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    waiting = subprocess.Popen(
        [sys.executable, "-c", WAITS, str(other.pid)], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    )
    try:
        assert waiting.stdout.readline() == "waits\n" and waiting.poll() is None
        other.kill()
        if reaped:
            other.wait()
        assert waiting.wait(timeout=60) == 1
    finally:
        for process in (other, waiting):
            process.kill()
            process.communicate()
