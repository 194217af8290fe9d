"""`gradscope measure` on checkpoints of every kind, and the sample that it takes of long rollouts."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from support.adapters import save_adapter
from support.cli import refusal, run
from support.policies import make_policy, make_responses, save_checkpoint, write_jsonl
from support.tiers import every

from gradscope.gradients import MeasureSettings, measure, settings as measure_settings
from gradscope.gradients.settings import settle_sample
from gradscope.policy import load_policy
from gradscope.rollouts import read_rollouts

pytestmark = pytest.mark.usefixtures("undrawn")

QUICK = ("--no-figures", "--no-self-check", "--device", "cpu")


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> tuple[Path, Path]:
    """An adapter beside its base, and rollouts."""
    folder = tmp_path_factory.mktemp("job")
    save_checkpoint(folder / "base", "qwen2")
    save_adapter(folder / "adapter", folder / "base", r=2, target_modules=["q_proj", "up_proj"])
    names = ("prompt_ids", "response_ids", "group", "reward", "response_mask")
    rows = [{name: getattr(r, name) for name in names} for r in make_responses(make_policy("qwen2"))]
    return folder / "adapter", write_jsonl(folder / "rollouts.jsonl", rows)


def read(out: Path) -> tuple[pd.DataFrame, dict]:
    return pd.read_parquet(out / "tokens.parquet"), json.loads((out / "manifest.json").read_text())


@pytest.mark.parametrize("params", every(2, ["all", "adapter"]))
def test_an_adapter_is_measured_merged_or_alone_and_the_manifest_says_which(params, job, tmp_path):
    adapter, rollouts = job
    run("measure", adapter, rollouts, "--out", tmp_path, "--params", params, *QUICK)
    table, manifest = read(tmp_path)
    policy = load_policy(adapter, params=params)
    expected = measure(policy, read_rollouts(rollouts, policy), self_check=False)
    pd.testing.assert_frame_equal(table, expected)
    assert (manifest["params"], manifest["key"]["params"]) == (params, params)
    assert manifest["base_model"]["path"] == str(adapter.parent / "base")
    assert manifest["model"]["sha256"] != manifest["base_model"]["sha256"]


@pytest.mark.all
def test_figures_and_summary_of_an_adapter_are_drawn(job, tmp_path, capsys):
    adapter, rollouts = job
    run("measure", adapter, rollouts, "--out", tmp_path, "--params", "adapter", "--device", "cpu")
    assert "over the adapter's parameters" in capsys.readouterr().out
    assert (tmp_path / "figures" / "summary.txt").is_file()
    drawn = pd.read_csv(tmp_path / "figures" / "layers_by_interval.csv")
    assert "the adapter's parameters" in {*drawn["layer"]} and "all parameters" not in {*drawn["layer"]}
    assert read(tmp_path)[1]["self_check"]["largest_difference"] < 1e-3


def test_a_plan_is_of_the_training_step_that_would_be_measured(job, tmp_path, capsys):
    base = job[0].parent / "base"
    rows = [
        {"prompt_tokens": [1, 2], "response_tokens": [3] * length, "step": step, "advantage": 1.0}
        for step, length in ((4, 5), (5, 7))
    ]
    dump = write_jsonl(tmp_path / "run_rollouts_000000.jsonl", rows)
    for step, tokens in ((("--step", "4"), 5), (("--step", "5"), 7), ((), 12)):
        run("measure", base, dump, "--plan", "--flops", "1e13", *step)
        assert f"{tokens} response tokens" in capsys.readouterr().out
    assert "has no step 6" in refusal(capsys, "measure", base, dump, "--plan", "--flops", "1e13", "--step", "6")


# The sample of long rollouts.


def test_auto_measures_a_sample_of_more_tokens_than_the_budget_and_all_of_fewer():
    auto = MeasureSettings(tokens_per_interval="auto")
    assert settle_sample(auto, measure_settings.BUDGET).tokens_per_interval is None
    assert settle_sample(auto, measure_settings.BUDGET + 1).tokens_per_interval == 12_500
    assert settle_sample(auto, 10**6, intervals=2).tokens_per_interval == 25_000
    for given in (None, 7):
        settings = MeasureSettings(tokens_per_interval=given)
        assert settle_sample(settings, 10**6) == settings


@pytest.mark.parametrize("prompts, each", [(1, 500), (20, 500), (21, 525), (400, 10_000), (1_000, 12_500)])
def test_enough_is_so_many_tokens_for_each_prompt_between_a_least_and_a_most(prompts, each):
    enough = MeasureSettings(tokens_per_interval="enough")
    assert settle_sample(enough, 10**6, num_prompts=prompts).tokens_per_interval == each
    assert settle_sample(enough, each, num_prompts=prompts).tokens_per_interval is None
    assert settle_sample(replace(enough, minutes=1), 10**6, num_prompts=prompts).tokens_per_interval is None


def test_the_command_says_that_it_took_a_sample_and_how_to_measure_everything(job, tmp_path, capsys, monkeypatch):
    adapter, rollouts = job
    base = adapter.parent / "base"
    for module in (measure_settings, *(sys.modules[f"gradscope.gradients.{name}"] for name in ("measure", "table"))):
        monkeypatch.setattr(module, "BUDGET", 12)
    run("measure", base, rollouts, "--out", tmp_path / "sample", *QUICK)
    table, manifest = read(tmp_path / "sample")
    said = capsys.readouterr().out
    assert f"at most 3 tokens per interval: {len(table)} tokens" in said and "--tokens-per-interval none" in said
    sample = manifest["sample"]
    assert sample.pop("error").split(":")[0] in said
    assert sample == {"tokens_per_interval": 3, "why": "the default above 12 tokens", "drawn": "proportional"}
    assert manifest["settings"]["tokens_per_interval"] == 3
    assert manifest["tokens_measured"] == table["param_grad_norm"].notna().sum() < len(table)
    # Asked for by its number, it is the same run.
    run("measure", base, rollouts, "--out", tmp_path / "sample", "--tokens-per-interval", "3", *QUICK)
    assert "already measured" in capsys.readouterr().out
    run("measure", base, rollouts, "--out", tmp_path / "all", "--tokens-per-interval", "none", *QUICK)
    table, manifest = read(tmp_path / "all")
    assert table["param_grad_norm"].notna().all() and manifest["sample"] == "every token"
    assert "at most" not in capsys.readouterr().out
