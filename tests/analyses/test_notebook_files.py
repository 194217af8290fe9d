"""The notebooks with outputs are those of their scripts."""

import json
import re

import pytest

NAMES = ("custom_weighting", "first_look", "your_checkpoint")


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_holds_its_scripts_cells_and_their_outputs(repository, name):
    script = (repository / "analyses" / "notebooks" / f"{name}.py").read_text(encoding="utf-8")
    cells = [cell.strip() for cell in re.split(r"^# %%$", script, flags=re.MULTILINE)[1:]]
    code = [re.split(r"^# %% \[markdown\]$", cell, flags=re.MULTILINE)[0].strip() for cell in cells]
    made = json.loads((repository / "docs" / "notebooks" / f"{name}.ipynb").read_text(encoding="utf-8"))
    own = [cell for cell in made["cells"] if cell["cell_type"] == "code"]
    assert [strip("".join(cell["source"])) for cell in own] == [strip(cell) for cell in code]
    assert all(cell["execution_count"] for cell in own) and any(cell["outputs"] for cell in own)
    outputs = [output for cell in own for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error" or output.get("name") == "stderr"]


def strip(code: str) -> str:
    return re.sub(r"\n{2,}", "\n\n", code).strip()
