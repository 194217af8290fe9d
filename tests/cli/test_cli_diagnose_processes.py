"""Two processes diagnose what one diagnoses, and share the summed gradients that figures and page rest on."""

from __future__ import annotations

import json
from bisect import bisect_left

import pandas as pd
import torch
from support.cli import run
from support.pages import BRIEF, write_rows
from support.policies import make_batch, make_policy, save_checkpoint
from support.processes import launch

from gradscope.gradients.summed.prompts import Sizes, plan_sums


def test_two_processes_write_the_numbers_of_one_for_each_of_several_checkpoints(tmp_path):
    models = [save_checkpoint(tmp_path / f"step-{step}", "qwen2", seed=step) for step in (0, 1)]
    command = ("diagnose", *models, "--rollouts", write_rows(tmp_path / "rollouts.jsonl"), *BRIEF, "--out")
    ended = launch("-m", "gradscope", *command, tmp_path / "two")
    assert [process.status for process in ended] == [0, 0], ended[0].stderr + ended[1].stderr
    run(*command, tmp_path / "one")
    for name in ("step-0/data/statistics.csv", "step-1/data/statistics.csv", "data/trend.csv"):
        assert (tmp_path / "two" / name).read_text() == (tmp_path / "one" / name).read_text(), name
    assert json.loads((tmp_path / "two" / "step-1" / "manifest.json").read_text())["processes"] == 2
    assert (tmp_path / "two" / "report.html").is_file()


def largest_sliced(held: int) -> str:
    """Most bytes in which the summed gradients of these rollouts are still made in slices."""
    policy = make_policy("qwen2")
    sizes = Sizes.of(policy, make_batch(policy))

    def is_whole(memory: int) -> bool:
        return plan_sums(sizes, rows=4, held=held, memory=memory, metric=held > 8).way == "whole"

    return str(bisect_left(range(10**9), True, lo=10**6, key=is_whole) - 1)


def test_two_processes_share_the_summed_gradients_of_page_and_figures(tmp_path):
    model, rollouts = save_checkpoint(tmp_path / "step-1", "qwen2"), write_rows(tmp_path / "rollouts.jsonl")
    save_state(model / "optimizer.pt")
    page = ("diagnose", model, "--rollouts", rollouts, *BRIEF, "--gradient-memory", largest_sliced(12))
    figures = ("measure", model, rollouts, "--no-self-check", "--device", "cpu")
    figures = (*figures, "--gradient-memory", largest_sliced(8), "--minutes", "0.000001")  # sketches, then
    for command, results in (
        (page, ["data/statistics.csv"]),
        (figures, ["figures/cosines.csv", "figures/figure_1.csv"]),
    ):
        one, two = (tmp_path / f"{command[0]}-{count}" for count in ("one", "two"))
        run(*command, "--out", one)
        ended = launch("-m", "gradscope", *command, "--out", two)
        assert [process.status for process in ended] == [0, 0], ended[0].stderr + ended[1].stderr
        for name in results:
            pd.testing.assert_frame_equal(*(pd.read_csv(folder / name) for folder in (one, two)), rtol=1e-4, atol=1e-9)
    assert "adamw" in set(pd.read_csv(tmp_path / "diagnose-two" / "data/statistics.csv")["metric"])
    assert "slices of the parameters" in (tmp_path / "diagnose-two" / "report.html").read_text()
    assert json.loads((two / "manifest.json").read_text())["summed_gradients"]["way"] == "sketches"


def save_state(path) -> None:
    model = make_policy("qwen2").model
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer.step()
    torch.save(optimizer.state_dict(), path)
