"""Two processes diagnose what one diagnoses, and share the summed gradients that figures and page rest on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch
from support.cli import run
from support.pages import BRIEF, write_rows
from support.policies import make_batch, make_policy, save_checkpoint
from support.processes import launch

from gradscope.gradients import Resources, TokenJacobian

pytestmark = pytest.mark.usefixtures("undrawn")
UNDRAWN = """
from tests.support.pictures import draw_nothing
draw_nothing()
from gradscope.cli import run_script
run_script()
"""


def sketched(rows: int, pairs: str) -> str:
    """Bytes in which the summed gradients of these rollouts are sketches: the fewest that whole ones do not fit in."""
    policy = make_policy("qwen2")
    J, memory = TokenJacobian(policy, make_batch(policy), Resources(1 << 40)), 1 << 40
    while J.plan_gram(rows, pairs=pairs, metric=pairs == "all").way == "whole":
        memory //= 2
        J.resources = replace(J.resources, vectors=memory)
    return str(memory)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> list[Path]:
    """Two checkpoints, the second with AdamW's state, and rollouts beside them."""
    folder = tmp_path_factory.mktemp("models")
    write_rows(folder / "rollouts.jsonl")
    models = [save_checkpoint(folder / f"step-{step}", "qwen2", seed=step) for step in (0, 1)]
    save_state(models[1] / "optimizer.pt")
    return models


def run_both_ways(folder: Path, *command: object) -> tuple[Path, Path]:
    """The folders of one process and of two."""
    one, two = folder / "one", folder / "two"
    run(*command, "--out", one)
    ended = launch("-c", UNDRAWN, *command, "--out", two)
    assert [process.status for process in ended] == [0, 0], ended[0].stderr + ended[1].stderr
    return one, two


def assert_equal_numbers(one: Path, two: Path, *names: str, rtol: float = 1e-4, atol: float = 1e-9) -> None:
    """Sums over prompts are added up in another order: float32 against float32."""
    for name in names:
        pd.testing.assert_frame_equal(*(pd.read_csv(folder / name) for folder in (one, two)), rtol=rtol, atol=atol)


@pytest.mark.all
def test_two_processes_diagnose_what_one_does_for_each_of_several_checkpoints(models, tmp_path):
    command = ("diagnose", *models, "--rollouts", models[0].parent / "rollouts.jsonl", *BRIEF)
    one, two = run_both_ways(tmp_path, *command, "--gradient-memory", sketched(4, "all"))
    assert_equal_numbers(one, two, "step-0/data/statistics.csv", "step-1/data/statistics.csv", "data/trend.csv")
    manifest = json.loads((two / "step-1" / "manifest.json").read_text())
    assert (manifest["processes"], manifest["summed_gradients"]["way"]) == (2, "sketches")
    assert "adamw" in set(pd.read_csv(two / "step-1/data/statistics.csv")["metric"])
    assert "sketches of" in (two / "step-1" / "report.html").read_text()
    assert (two / "report.html").is_file()


@pytest.mark.all
def test_two_processes_compare_what_one_does(models, tmp_path):
    command = ("compare", models[1], models[0].parent / "rollouts.jsonl", "--no-self-check", "--device", "cpu")
    command += ("--methods", "reweight", "up-weight", "lopti", "top-entropy:q=0.4")
    one, two = run_both_ways(tmp_path, *command)
    assert_equal_numbers(one, two, "by_interval.csv", rtol=1e-3, atol=1e-6)
    tables = [pd.read_csv(folder / "compare.csv") for folder in (one, two)]
    # Their denominators are near 0 in some redraws of the few prompts, where rounding counts.
    fragile = tables[0]["statistic"].str.startswith("signal_to_noise")
    assert fragile.sum() >= 2
    for rows, rtol in ((fragile, 0.2), (~fragile, 1e-3)):
        pd.testing.assert_frame_equal(*(table[rows] for table in tables), check_exact=False, rtol=rtol, atol=1e-6)
    assert (tables[1]["statistic"] == "cosine").sum() == 6  # not of both steps together


@pytest.mark.all
def test_two_processes_share_the_sketches_of_the_figures(models, tmp_path):
    command = ("measure", models[1], models[0].parent / "rollouts.jsonl", "--no-self-check", "--device", "cpu")
    command += ("--gradient-memory", sketched(8, "within"))
    one, two = run_both_ways(tmp_path, *command)
    assert_equal_numbers(one, two, "figures/cosines.csv", "figures/figure_1.csv")
    assert json.loads((two / "manifest.json").read_text())["summed_gradients"]["way"] == "sketches"


def save_state(path: Path) -> None:
    model = make_policy("qwen2").model
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer.step()
    torch.save(optimizer.state_dict(), path)
