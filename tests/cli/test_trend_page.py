"""The trend's page from the checkpoints' manifests: whose rollouts they are, and where prompts were too few."""

from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np
import pandas as pd
import pytest

from gradscope.cli.pages import write_trend
from gradscope.diagnosis.rows import join_rows, make_rows, one_row
from gradscope.resampling import TOO_FEW, Supply

pytestmark = pytest.mark.usefixtures("undrawn")

STATISTICS = join_rows(
    [
        make_rows("token_share", np.array([[0.2], [0.1], [0.3]]), 100, unit="share", intervals=["[0, ¼)"]),
        one_row("prompts", 8.0, 100, unit="prompts"),
    ]
)


def checkpoint(folder, own: int | None, supply: Supply) -> None:
    (folder / "data").mkdir(parents=True)
    STATISTICS.to_csv(folder / "data" / "statistics.csv", index=False)
    (folder / "report.html").write_text("a page")
    rollouts = {"path": "log.jsonl", "notes": [], "step_note": None, "other_step": False}
    told = {"rollouts": rollouts, "diagnosis": {"optimizer_state": None}, "tokens": 100, "files": [], "key": {}}
    told |= {"own_responses": own, "supply": asdict(supply)}
    (folder / "manifest.json").write_text(json.dumps(told))


def test_a_checkpoint_all_of_whose_responses_in_use_are_others_is_marked_and_mixed_ones_are_counted(tmp_path, capsys):
    enough, few = Supply(8, 8, 64), Supply(1, 2, 16, of_informative=9, of_prompts=12, minutes=24.2)
    given = {3: (None, enough), 4: (0, enough), 5: (24, enough), 6: (64, few)}
    models = [f"checkpoint-{step}" for step in given]
    folders = [tmp_path / "out" / model for model in models]
    for folder, (own, supply) in zip(folders, given.values(), strict=True):
        checkpoint(folder, own, supply)
    write_trend(models, folders, out=tmp_path / "out", overwrite=False)
    trend = pd.read_csv(tmp_path / "out" / "data" / "trend.csv").drop_duplicates("step").set_index("step")
    assert trend["other_step"].to_dict() == {3: False, 4: True, 5: False, 6: False}
    page = (tmp_path / "out" / "report.html").read_text()
    assert "at step 4 were sampled by a different checkpoint" in page
    assert "at step 5, 24 of the 64 responses" in page.replace("At step 5", "at step 5")
    assert f"{TOO_FEW} at step 6" in page and "25 minutes" in page
