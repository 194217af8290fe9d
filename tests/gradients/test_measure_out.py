"""A measurement that is kept: from Python it goes on as the command's does, to the same files."""

import json
from pathlib import Path

import pandas as pd
import pytest
import torch
from support.gradients import raising
from support.policies import make_policy, make_responses, save_checkpoint, write_jsonl
from support.progress import Listener

import gradscope
from gradscope import load_policy, measure, read_rollouts
from gradscope.cli.commands import main
from gradscope.errors import InputError
from gradscope.gradients import Resources
from gradscope.objective import LossSettings
from gradscope.policy import AdamWSettings, AdamWState, float_parameters
from gradscope.runs import RunFolder


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> tuple[Path, Path]:
    """A checkpoint and rollouts of it."""
    folder = tmp_path_factory.mktemp("job")
    names = ("prompt_ids", "response_ids", "group", "reward", "old_logprobs", "response_mask")
    rows = [{name: getattr(r, name) for name in names} for r in make_responses(make_policy("llama"))]
    return save_checkpoint(folder / "llama", "llama"), write_jsonl(folder / "rollouts.jsonl", rows)


def stop_after(count: int, monkeypatch, run) -> None:
    """Run until the disk is full after so many parts."""
    right = RunFolder.write_part

    def write(folder, index, frame):
        if len([*folder.partial.glob("part-*")]) == count:
            raise OSError(28, "No space left on device")
        right(folder, index, frame)

    with monkeypatch.context() as patch, pytest.raises((OSError, SystemExit)):
        patch.setattr(RunFolder, "write_part", write)
        run()


def written_parts(monkeypatch) -> list[int]:
    """Which parts are written from now on."""
    written, right = [], RunFolder.write_part
    monkeypatch.setattr(RunFolder, "write_part", lambda *args: (written.append(args[1]), right(*args)))
    return written


def command(job: tuple[Path, Path], out: Path) -> None:
    flags = ["--no-figures", "--device", "cpu", "--tokens-per-interval", "none"]
    main(["measure", *map(str, job), "--out", str(out), *flags])


def test_a_run_at_another_temperature_is_refused_as_one(job, tmp_path, capsys):
    command(job, tmp_path / "out")
    flags = ["--no-figures", "--device", "cpu", "--temperature", "0.5"]
    with pytest.raises(SystemExit):
        main(["measure", *map(str, job), "--out", str(tmp_path / "out"), *flags])
    assert "temperature 1.0, not 0.5" in capsys.readouterr().err


def test_an_interrupted_measurement_goes_on_to_the_same_table(job, tmp_path, monkeypatch):
    policy = load_policy(job[0], device="cpu")
    batch = read_rollouts(job[1], policy)
    whole = measure(policy, batch)
    stop_after(2, monkeypatch, lambda: measure(policy, batch, out=tmp_path / "out"))
    made = {int(path.name[5:11]) for path in tmp_path.rglob("part-*")}
    assert len(made) == 2
    with pytest.raises(InputError):
        measure(policy, batch, out=tmp_path / "out", temperature=0.5)
    written = written_parts(monkeypatch)
    pd.testing.assert_frame_equal(measure(policy, batch, out=tmp_path / "out"), whole)
    assert {*written} == {*range(len(batch))} - made
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"tokens.parquet", "manifest.json"}
    policy.model.register_forward_hook(raising(AssertionError("a finished one is read")))
    pd.testing.assert_frame_equal(measure(policy, batch, out=tmp_path / "out"), whole)


def test_python_goes_on_where_the_command_was_stopped_and_the_other_way_round(job, tmp_path, monkeypatch, capsys):
    command(job, tmp_path / "whole")
    told = json.loads((tmp_path / "whole" / "manifest.json").read_text())
    stop_after(2, monkeypatch, lambda: command(job, tmp_path / "one"))
    stop_after(2, monkeypatch, lambda: measure(*job, out=tmp_path / "two"))
    written = written_parts(monkeypatch)
    measure(*job, out=tmp_path / "one")
    command(job, tmp_path / "two")
    assert "resuming the unfinished run" in capsys.readouterr().out
    assert len(written) == 2 * (len(make_responses(make_policy("llama"))) - 2)
    for name in ("one", "two"):
        assert (tmp_path / name / "tokens.parquet").read_bytes() == (tmp_path / "whole" / "tokens.parquet").read_bytes()
        found = json.loads((tmp_path / name / "manifest.json").read_text())
        assert found["key"] == told["key"]
        assert {*told} - {*found} <= {"device_map"}


class Interrupting(Listener):
    """A Progress that raises an error when the engine is checked."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def stage(self, name: str, *args, **kwargs):
        if name == "self-check":
            raise self.error
        return super().stage(name, *args, **kwargs)


def test_a_run_of_minutes_that_is_refused_leaves_nothing(job, tmp_path):
    resources = Resources(progress=Interrupting(InputError("unsound")))
    with pytest.raises(InputError):
        measure(*job, out=tmp_path / "out", minutes=1.0, resources=resources)
    assert not (tmp_path / "out" / ".partial").exists()
    measure(*job, out=tmp_path / "out", minutes=2.0)  # another run, which is not refused


def test_what_changes_a_number_is_another_run(job, tmp_path):
    policy = load_policy(job[0], device="cpu")
    batch = read_rollouts(job[1], policy)
    states = [
        AdamWState(
            {name: torch.full_like(p, value) for name, p in float_parameters(policy.model)},
            {name: 3 for name, _ in float_parameters(policy.model)},
            {name: AdamWSettings() for name, _ in float_parameters(policy.model)},
        )
        for value in (1e-4, 2e-4)
    ]
    quick = {"self_check": False, "metric": "adamw", "optimizer_state": states[0]}
    measure(policy, batch, out=tmp_path, **quick)
    for change in (
        {"optimizer_state": states[1]},
        {"tokens": torch.tensor([0, 1])},
        {"edges": (0.0, 0.5, 1.0)},
        {"loss": LossSettings(kl_coef=0.5)},
    ):
        with pytest.raises(InputError):
            measure(policy, batch, out=tmp_path, **quick | change)
    measure(policy, batch, out=tmp_path, **quick)


@pytest.mark.parametrize("change", ["one number", "two rows exchanged"])
def test_a_policy_whose_weights_have_changed_is_another_run(job, tmp_path, change):
    policy = load_policy(job[0], device="cpu")
    batch = read_rollouts(job[1], policy)
    before = measure(policy, batch, out=tmp_path, self_check=False)
    weight = policy.model.get_input_embeddings().weight
    with torch.no_grad():
        if change == "one number":
            weight[5, 0] += 1e-6
        else:
            weight[[5, 6]] = weight[[6, 5]]
    with pytest.raises(InputError):
        measure(policy, batch, out=tmp_path, self_check=False)
    again = measure(load_policy(job[0], device="cpu"), batch, out=tmp_path, self_check=False)
    pd.testing.assert_frame_equal(again, before)


def test_a_policy_without_files_is_not_kept(tmp_path):
    policy = make_policy("llama")
    batch = gradscope.rollouts.collate(make_responses(policy))
    with pytest.raises(InputError):
        measure(policy, batch, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
