"""`gradscope diagnose` on batches that lack something: a page nonetheless, which says what is missing."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from support.cli import run
from support.pages import BRIEF, native_rows, read_page, read_statistics, value, write_rows
from support.policies import make_policy, save_checkpoint

pytestmark = pytest.mark.usefixtures("undrawn")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("run") / "checkpoint-3", "qwen2")


@pytest.fixture
def diagnosed(model, tmp_path):
    """Diagnose these rows; the table, the statistics and the page's text."""

    def call(rows: list[dict], *flags: object, model: Path = model) -> tuple[pd.DataFrame, pd.DataFrame, str]:
        out = tmp_path / "out"
        rollouts = write_rows(tmp_path / "rollouts.jsonl", rows)
        run("diagnose", model, "--rollouts", rollouts, "--out", out, *BRIEF, *flags)
        assert not (out / ".partial").exists()
        return pd.read_parquet(out / "tokens.parquet"), read_statistics(out), read_page(out).text

    return call


def shares_by_hand(table: pd.DataFrame) -> list[float]:
    """Of Σ‖w·g‖², each interval's ratio estimate by (w·‖e − π‖)²."""
    weight = table["weight"].astype(float)
    squares, proxies = ((weight * table[name]) ** 2 for name in ("param_grad_norm", "logit_grad_norm"))
    sums = [
        squares[own].sum() / proxies[own & squares.notna()].sum() * proxies[own].sum()
        for own in (table["interval"] == i for i in range(4))
        if own.any()
    ]
    return (np.array(sums) / sum(sums)).tolist()


@pytest.mark.all
def test_equal_rewards_leave_no_weight_and_no_sentence_on_gradients(diagnosed):
    table, statistics, page = diagnosed(native_rows(reward=1.0))
    assert (table["weight"] == 0).all()
    assert "Every weight of the loss is 0 (equal rewards in each group, or all clipped), so there" in page
    assert {*statistics["metric"]} == {"none"} and "dominate:" not in page
    found = value(statistics, "token_share", "none")
    assert found == pytest.approx([float((table["interval"] == i).mean()) for i in range(4)])


@pytest.mark.all
def test_a_temperature_that_the_rows_lack_is_the_first_warning_until_one_is_given(diagnosed, tmp_path):
    rows = [{name: value for name, value in row.items() if name != "temperature"} for row in native_rows()]
    for flags, missing in (((), True), (("--temperature", "1.0", "--overwrite"), False)):
        _, _, page = diagnosed(rows, *flags)
        assert ("The sampling temperature is not in the log and was taken as 1" in page) == missing
        notes = json.loads((tmp_path / "out" / "manifest.json").read_text())["rollouts"]["notes"]
        assert any("temperature" in note for note in notes) == missing


@pytest.mark.all
def test_one_prompt_alone_has_numbers_without_intervals(diagnosed):
    rows = [row for row in native_rows(group=0) if row["prompt_ids"] == native_rows()[0]["prompt_ids"]]
    table, statistics, page = diagnosed(rows)
    assert table["group"].nunique() == 1 and len(rows) == 2
    assert "All responses are to one prompt, so there are no bounds and no signal fraction." in page
    found = [share for share in value(statistics, "squared_share") if share == share]
    assert found == pytest.approx(shares_by_hand(table), rel=1e-5)
    rows = statistics[statistics["statistic"].isin(["squared_share", "gradient_share"])]
    assert (rows["lower"] == "").all() if rows["lower"].dtype == object else rows["lower"].isna().all()


@pytest.mark.all
def test_an_empty_low_interval_is_named_and_the_others_have_their_numbers(diagnosed, tmp_path):
    sure = save_checkpoint(tmp_path / "sure", "qwen2", sharpness=14.0)
    table, statistics, page = diagnosed(greedy_rows(), model=sure)
    assert 0 not in {*table["interval"]} and 3 in {*table["interval"]}
    assert "No token has π in [0, ¼), so its statistics are NaN." in page
    found = [share for share in value(statistics, "squared_share") if share == share]
    assert found == pytest.approx(shares_by_hand(table), rel=1e-5)
    assert value(statistics, "tokens", "none") == np.bincount(table["interval"], minlength=4).tolist()


@torch.no_grad()
def greedy_rows() -> list[dict]:
    """The likeliest tokens of a sharp policy after several prompts, with rewards, as far as they have π ≥ ¼."""
    policy, rows = make_policy("qwen2", sharpness=14.0), []
    for prompt in ([4, 5, 6], [10, 11, 12], [20, 21, 22], [30, 31, 32]):
        for first, reward in ((40, 0.0), (50, 1.0)):
            ids, response = [*prompt, first], []
            while len(response) < 5:
                best = policy.model(input_ids=torch.tensor([ids])).logits[0, -1].softmax(-1).max(-1)
                if best.values < 0.3:
                    break
                response.append(int(best.indices))
                ids.append(response[-1])
            if response:
                row = {"prompt_ids": [*prompt, first], "response_ids": response, "group": prompt[0], "reward": reward}
                rows.append(row)
    return rows


@pytest.mark.all
def test_of_a_stratified_sample_the_sums_are_scaled_and_the_page_says_how_many_norms_are_known(diagnosed):
    table, statistics, page = diagnosed(native_rows(), "--tokens-per-interval", "3", "--sample", "stratified")
    known = table[table["param_grad_norm"].notna()]
    assert (known["interval"].value_counts() <= 3).all() and len(known) < len(table)
    assert f"The norms of {len(known)} of {len(table)} tokens were measured" in page and "3 of each interval" in page
    found = [share for share in value(statistics, "squared_share") if share == share]
    assert found == pytest.approx(shares_by_hand(table), rel=1e-5)
