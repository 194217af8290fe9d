"""Two processes diagnose what one diagnoses, and share the summed gradients that figures and page rest on."""

from __future__ import annotations

import json

import pandas as pd
import pytest
import torch
from diagnosed import BRIEF, run, write_rows
from test_distributed import launch
from tiny import make_batch, make_policy, save_checkpoint

from gradscope.prompt_gradients import Sizes, slices_memory


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


def budget_of(way: str) -> int:
    """Bytes in which the summed gradients of these rollouts are made this way."""
    policy = make_policy("qwen2")
    sizes = Sizes.of(policy, make_batch(policy))
    fifth = slices_memory(sizes, rows=4, held=12, width=sizes.parameters // 5)
    return {"whole": 1 << 30, "slices": fifth, "sketches": fifth // 3}[way]


@pytest.mark.parametrize("way", ["slices", "sketches"])
def test_two_processes_share_the_summed_gradients_of_figures_and_page(way, tmp_path):
    model, rollouts = save_checkpoint(tmp_path / "step-1", "qwen2"), write_rows(tmp_path / "rollouts.jsonl")
    save_state(model / "optimizer.pt")
    memory = ("--gradient-memory", str(budget_of(way)))
    page = ("diagnose", model, "--rollouts", rollouts, *BRIEF, *memory, "--out")
    figures = ("measure", model, rollouts, "--no-self-check", "--device", "cpu", *memory, "--out")
    for command, results in (
        (page, ["data/statistics.csv"]),
        (figures, ["figures/cosines.csv", "figures/figure_1.csv"]),
    ):
        folders = [tmp_path / f"{command[0]}-{count}" for count in ("one", "two")]
        run(*command, folders[0])
        ended = launch("-m", "gradscope", *command, folders[1])
        assert [process.status for process in ended] == [0, 0], ended[0].stderr + ended[1].stderr
        for name in results:
            one, two = (pd.read_csv(folder / name) for folder in folders)
            pd.testing.assert_frame_equal(one, two, rtol=1e-4, atol=1e-9)
    told = json.loads((folders[1] / "manifest.json").read_text())["summed_gradients"]
    assert told["way"] == way and "adamw" in set(
        pd.read_csv(tmp_path / "diagnose-two" / "data/statistics.csv")["metric"]
    )


def save_state(path) -> None:
    model = make_policy("qwen2").model
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer.step()
    torch.save(optimizer.state_dict(), path)
