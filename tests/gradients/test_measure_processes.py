"""Several processes measure what one measures: the same table, the same resumption, one error for all."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from support.policies import make_batch, make_policy, make_responses, save_checkpoint, write_jsonl
from support.processes import launch
from support.refusals import refused
from support.tiers import every

from gradscope import load_policy, measure
from gradscope.cli import commands as cli
from gradscope.errors import InputError, SelfCheckError
from gradscope.gradients import Resources, TokenJacobian
from gradscope.policy import join_launch
from gradscope.runs import ALONE, Processes, RunFolder, deal_by_cost


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> tuple[Path, Path]:
    """A checkpoint and rollouts of it."""
    folder = tmp_path_factory.mktemp("job")
    names = ("prompt_ids", "response_ids", "group", "reward", "old_logprobs", "response_mask")
    rows = [{name: getattr(r, name) for name in names} for r in make_responses(make_policy("llama", sharpness=5.0))]
    return save_checkpoint(folder / "llama", "llama", sharpness=5.0), write_jsonl(folder / "rollouts.jsonl", rows)


@pytest.mark.all
def test_two_processes_go_on_where_one_was_stopped_and_write_its_table(job, tmp_path, capsys):
    model, rollouts = job
    arguments = ("measure", model, rollouts, "--device", "cpu", "--tokens-per-interval", "4", "--no-figures", "--out")
    cli.main([*map(str, arguments), str(tmp_path / "one")])
    expected = pd.read_parquet(tmp_path / "one" / "tokens.parquet")
    shares = [row for row in range(6) if len(expected[expected["response"] == row])]
    assert len(shares) == 6

    # A folder stands where the part of response 4 would be written: whoever has it fails, and so do both.
    out = tmp_path / "two"
    obstacle = out / ".partial" / "part-000004.parquet"
    stopped_before(out, tmp_path / "one", expected)
    obstacle.mkdir()
    ended = launch("-m", "gradscope", *arguments, out)
    assert all(process.status for process in ended), ended[0].stderr
    assert all("part-000004" in process.stderr and "Traceback" not in process.stderr for process in ended)
    assert not (out / "tokens.parquet").exists() and (out / ".partial" / "part-000000.parquet").is_file()

    obstacle.rmdir()
    ended = launch("-m", "gradscope", *arguments, out)
    assert [process.status for process in ended] == [0, 0], ended[0].stderr + ended[1].stderr
    found = pd.read_parquet(out / "tokens.parquet")
    # Response 0 was there before, marked; all others are bit for bit those of one process.
    marked = found["response"] == 0
    assert (found.loc[marked, "entropy"] == -1.0).all()
    pd.testing.assert_frame_equal(found[~marked], expected[~marked], check_exact=True)
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["processes"] == 2 and manifest["tokens_measured"] == expected["param_grad_norm"].notna().sum()
    assert not (out / ".partial").exists()
    capsys.readouterr()


def stopped_before(out: Path, finished: Path, table: pd.DataFrame) -> None:
    """What a run of the same key leaves behind that was killed after its first response, which is marked."""
    folder = RunFolder(out, json.loads((finished / "manifest.json").read_text())["key"])
    folder.begin()
    folder.write_part(0, table[table["response"] == 0].assign(entropy=np.float32(-1.0)))


def test_shares_are_everyones_alike_and_cost_about_the_same():
    generator = np.random.default_rng(0)
    rows, costs = list(range(40)), generator.exponential(size=40).tolist()
    shares = deal_by_cost(rows, costs, 3)
    assert sorted(row for share in shares for row in share) == rows and all(share == sorted(share) for share in shares)
    loads = [sum(costs[row] for row in share) for share in shares]
    # The last one dealt went to the least: nobody is above the mean by more than one response.
    assert max(loads) <= sum(costs) / 3 + max(costs)
    assert max(loads) - min(loads) < 0.05 * sum(loads)
    assert deal_by_cost([], [], 2) == [[], []] and deal_by_cost([7], [1.0], 3) == [[7], [], []]


def test_a_response_costs_what_its_measured_tokens_look_back_on():
    policy = make_policy("llama")
    batch = make_batch(policy, holes=False)
    one, *two = (
        TokenJacobian(policy, batch, Resources(1, activations=1, processes=processes)).row_norms()
        for processes in (ALONE, Processes(0, 2), Processes(1, 2))
    )
    assert one.groups == [[row] for row in range(len(batch))]  # with rows for one token at a time
    assert one.share([3, 1]) == [[1], [3]]
    costs = [float(batch.sequence(row)[1].sum()) for row in range(len(batch))]
    for norms, rows in zip(two, deal_by_cost(range(len(batch)), costs, 2), strict=True):
        assert norms.share(range(len(batch))) == [[row] for row in rows]


class Other(Processes):
    """One of two, whose partner is the test."""

    theirs: tuple = ()

    def gather(self, items: list) -> list:
        return [*items, *self.theirs]


@pytest.mark.parametrize("kind", [InputError, SelfCheckError, OSError])
def test_an_error_of_one_process_is_one_of_the_others(kind):
    process = Other(0, 2)
    object.__setattr__(process, "theirs", ((kind, "what it was"),))
    with pytest.raises(kind), process.together():
        pass
    with pytest.raises(kind), Other(0, 2).together():
        raise kind("its own")


@pytest.mark.parametrize(
    ("device", "environment"),
    [
        ("cpu", {"ACCELERATE_USE_FSDP": "true"}),
        ("cuda:1", {}),
        (None, {}),
    ],
)
def test_launches_that_cannot_be_joined_are_refused(device, environment, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("gradscope.policy.launch.find_device", lambda device: device)
    with refused():
        join_launch(device)


def test_more_processes_than_responses_write_the_table_of_one(job, tmp_path, capsys):
    model, rollouts = job
    one = tmp_path / "one.jsonl"
    one.write_text(rollouts.read_text().splitlines()[0] + "\n")
    arguments = ("measure", model, one, "--device", "cpu", "--no-figures", "--out")
    cli.main([*map(str, arguments), str(tmp_path / "alone")])
    ended = launch("-m", "gradscope", *arguments, tmp_path / "two")
    assert [process.status for process in ended] == [0, 0], ended[0].stderr + ended[1].stderr
    found, expected = (pd.read_parquet(tmp_path / name / "tokens.parquet") for name in ("two", "alone"))
    pd.testing.assert_frame_equal(found, expected, check_exact=True)
    capsys.readouterr()


@pytest.mark.parametrize("option", every(2, ["--of=reverse-kl", "--weighting=opd"]))
def test_two_processes_ask_a_teacher_what_one_asks_it(job, option, tmp_path, capsys):
    model, rollouts = job
    teacher = save_checkpoint(tmp_path / "teacher", "llama", seed=7)
    arguments = ("measure", model, rollouts, option, "--teacher", teacher, "--device", "cpu", "--no-figures", "--out")
    cli.main([*map(str, arguments), str(tmp_path / "alone")])
    ended = launch("-m", "gradscope", *arguments, tmp_path / "two")
    assert [process.status for process in ended] == [0, 0], ended[0].stderr + ended[1].stderr
    found, expected = (pd.read_parquet(tmp_path / name / "tokens.parquet") for name in ("two", "alone"))
    asked = ["value", "param_grad_norm"] if option.startswith("--of") else ["teacher_logprob", "advantage", "weight"]
    assert expected[asked].abs().gt(0).all(axis=None)
    # The teacher scores other responses together, padded to other lengths: float32's rounding.
    pd.testing.assert_frame_equal(found, expected, rtol=1e-5, atol=1e-6)
    capsys.readouterr()


FROM_PYTHON = """
import sys
from gradscope import Resources, measure
from gradscope.policy import join_launch, load_policy
model, rollouts, out = sys.argv[1:]
processes, device = join_launch("cpu")
policy, resources = load_policy(model, device=device), Resources(processes=processes)
for minutes in (None, 1e-6):
    table = measure(policy, rollouts, minutes=minutes, resources=resources)
    table.to_parquet(f"{out}/{processes.rank}-{minutes}.parquet")
    kept = measure(policy, rollouts, minutes=minutes, resources=resources, out=f"{out}/kept-{minutes}")
    kept.to_parquet(f"{out}/{processes.rank}-{minutes}-kept.parquet")
"""


def test_from_python_two_processes_share_the_responses_and_both_get_the_table(job, tmp_path):
    model, rollouts = map(str, job)
    ended = launch("-c", FROM_PYTHON, model, rollouts, tmp_path)
    assert [process.status for process in ended] == [0, 0], ended[0].stderr + ended[1].stderr
    for minutes in (None, 1e-6):
        expected = measure(load_policy(model, device="cpu"), rollouts, minutes=minutes)
        for name in (f"0-{minutes}", f"1-{minutes}", f"0-{minutes}-kept", f"1-{minutes}-kept"):
            found = pd.read_parquet(tmp_path / f"{name}.parquet")
            pd.testing.assert_frame_equal(found, expected, check_exact=True)
