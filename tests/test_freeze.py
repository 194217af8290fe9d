"""The comparison of two commits' results sees what differs, and passes over clocks and places."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from safetensors.numpy import save_file
from support.freeze import list_differences


def write_results(folder: Path, *, value: float = 1.0, seconds: float = 3.0, note: str = "as it was") -> Path:
    folder.mkdir()
    pd.DataFrame({"norm": [value, np.nan], "seconds": seconds}).to_parquet(folder / "tokens.parquet")
    pd.DataFrame({"share": [value]}).to_csv(folder / "data.csv", index=False)
    told = {"key": {"alpha": value, "path": str(folder)}, "seconds": seconds, "nothing": float("nan")}
    (folder / "manifest.json").write_text(json.dumps(told))
    (folder / "summary.txt").write_text(f"{note}, in {seconds} s at {folder}\n")
    (folder / "report.html").write_text(str(seconds))
    save_file({"w": np.full(3, value, dtype=np.float32)}, folder / "model.safetensors")
    return folder


def test_clocks_and_places_are_no_difference(tmp_path):
    old, new = (write_results(tmp_path / name, seconds=n) for n, name in enumerate(("old", "new")))
    assert list(list_differences(old, new)) == []


@pytest.mark.parametrize(
    ("changed", "files"),
    [
        ({"value": np.nextafter(np.float32(1.0), np.float32(2.0)).item()}, {"tokens", "data", "manifest", "model"}),
        ({"note": "otherwise"}, {"summary"}),
    ],
)
def test_the_last_digit_of_a_number_and_a_word_are_seen(tmp_path, changed, files):
    found = list_differences(write_results(tmp_path / "old"), write_results(tmp_path / "new", **changed))
    assert {line.partition(".")[0] for line in found} == files


def test_a_file_that_one_side_lacks_is_named(tmp_path):
    old, new = (write_results(tmp_path / name) for name in ("old", "new"))
    (new / "data.csv").unlink()
    assert list(list_differences(old, new)) == ["data.csv is on one side only"]
