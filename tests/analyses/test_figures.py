"""Every figure and table of the paper is drawn from what the repository keeps of runs and measurements."""

from __future__ import annotations

import subprocess
import sys

import pandas as pd
import pytest
from support.tiers import every

from analyses import figures
from analyses.common.experiments import read
from gradscope.errors import InputError

pytestmark = pytest.mark.usefixtures("undrawn")
CASES = [(scale, name) for scale, names in read()["drawn"].items() for name in names]


@pytest.mark.parametrize(("scale", "name"), every(20, CASES))
def test_its_numbers_are_those_of_the_kept_runs(scale, name, tmp_path, repository):
    assert figures.draw_one(name, scale, tmp_path) is None
    files = sorted(tmp_path.rglob("*.csv"))
    assert files or name == "tables2_4"
    for file in files:
        found, expected = pd.read_csv(file), pd.read_csv(repository / "figures" / file.relative_to(tmp_path))
        pd.testing.assert_frame_equal(found, expected, rtol=1e-3)  # four digits are written


def test_what_is_no_figure_is_refused():
    with pytest.raises(InputError):
        figures.main(figures.Options(only=("fig99",)))


@pytest.mark.all
def test_drawing_loads_no_transformers():
    code = "import sys; from analyses.paper import fig1, fig4; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
