"""`gradscope tune`: what it writes, that an interrupted run goes on to the same files, and what it refuses."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from support.cli import assert_one_line, outcome_of
from support.policies import make_policy, make_responses, save_checkpoint, write_jsonl

from gradscope.cli import tune as cli_tune
from gradscope.policy import load_policy
from gradscope.rollouts import read_rollouts
from gradscope.updates import StepSettings, make_grid, screen, tune_batch

# torch itself calls torch.jit.script the first time that forward mode is used.
pytestmark = [
    pytest.mark.usefixtures("undrawn"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning"),
]

PROMPTS = 8
GRID = ("--alphas", 0, 0.5, "--etas", "none", 0.5)
SMALL = (*GRID, "--min-tokens", 2, "--micro-batch-size", 16)
RESULTS = {
    "settings.csv",
    "by_interval.csv",
    "summary.txt",
    "manifest.json",
    "figures/tuning.png",
    "figures/tuning.csv",
}
FIELDS = ("prompt_ids", "response_ids", "group", "temperature", "reward", "old_logprobs", "response_mask")


@pytest.fixture
def run(capsys):
    """Run `gradscope tune` in this process."""

    return partial(outcome_of, capsys, "tune")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("model") / "llama", "llama")


def make_rows(*fields: str, seed: int = 0, prompts: int = PROMPTS) -> list[dict]:
    sizes = {"lengths": (12,) * (2 * prompts), "prompt_lengths": (5,) * (2 * prompts)}
    responses = make_responses(make_policy("llama"), **sizes, seed=seed)
    return [{name: getattr(r, name) for name in fields or FIELDS} for r in responses]


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("rollouts") / "rollouts.jsonl", make_rows())


PAIRS = "reweight-lopti"
OWN = """
from dataclasses import dataclass
from gradscope.objective import Weighting, within

@dataclass(frozen=True)
class Own(Weighting):
    NAME = "own"
    share: float = within(0.5, 0, 1)

    def factors(self, tokens):
        return tokens.plain * self.share * tokens["entropy"]
"""


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


# What it writes.


def test_it_writes_what_the_functions_return_and_prints_the_summary(run, model, tmp_path):
    paths = [write_jsonl(tmp_path / f"{seed}.jsonl", make_rows(seed=seed)) for seed in range(2)]
    outcome = run(model, *paths, "--out", tmp_path / "out", *SMALL, "--learning-rate", 0.01, "--seed", 3)
    assert (outcome.status, outcome.err) == (0, "")
    assert set(contents(tmp_path / "out")) == RESULTS
    policy, grid = load_policy(model), make_grid([0, 0.5], [None, 0.5])
    step = StepSettings(learning_rate=0.01, micro_batch_size=16)
    parts = [
        tune_batch(policy, read_rollouts(path, policy), grid, step=step, actual=i == 0) for i, path in enumerate(paths)
    ]
    expected = screen(parts, grid, seed=np.random.default_rng(3), min_tokens=2)
    for name, frame in (("settings", expected.settings), ("by_interval", expected.by_interval)):
        table = pd.read_csv(tmp_path / "out" / f"{name}.csv")
        pd.testing.assert_frame_equal(table, frame, check_dtype=False, rtol=1e-12)
    summary = (tmp_path / "out" / "summary.txt").read_text()
    assert outcome.out.endswith(f"\n{summary}")
    assert "No one has shown that this statistic predicts" in summary and "SGD, learning rate 0.01" in summary
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["candidate"]["setting"] == expected.candidate["setting"] and manifest["prompts"] == [8, 8]
    assert manifest["spearman"]["held-out"]["value"] == expected.rankings["held-out"].value
    assert manifest["method"] == ["forward mode"] and set(manifest["files"]) == RESULTS - {"manifest.json"}
    drawn = pd.read_csv(tmp_path / "out" / "figures" / "tuning.csv")
    actual = drawn.loc[drawn["panel"].str.startswith("actual"), "difference"]
    assert actual.tolist() == pytest.approx(expected.settings["difference"].tolist(), rel=1e-12)


def test_any_weightings_grid_is_screened(run, model, rollouts, tmp_path):
    own = tmp_path / "own.py"
    own.write_text(OWN)
    methods = ("top-entropy:q=.2/.5", "reweight:alpha=0.5", f"{own}:own:share=0.5")
    flags = ("--batches", 2, "--min-tokens", 2, "--methods", *methods)
    outcome = run(model, rollouts, "--out", tmp_path / "out", *flags)
    assert (outcome.status, outcome.err) == (0, "")
    table = pd.read_csv(tmp_path / "out" / "settings.csv")
    names = ["plain", "top-entropy:q=.2", "top-entropy:q=.5", "reweight:alpha=0.5", f"{own}:own:share=0.5"]
    assert table["setting"].tolist() == names
    assert table["method"].tolist() == [PAIRS, *names[1:3], PAIRS, names[4]]
    summary = (tmp_path / "out" / "summary.txt").read_text()
    assert all(f"\n{name} " in summary for name in (*names[1:3], names[4]))
    drawn = pd.read_csv(tmp_path / "out" / "figures" / "tuning.csv")
    assert set(drawn["panel"].str.split(", ").str[0]) == {"predicted", "actual"} and drawn["panel"].nunique() == 4
    own.write_text(OWN.replace("self.share", "2"))
    assert_one_line(run(model, rollouts, "--out", tmp_path / "out", *flags), "--overwrite")


def save_state(model: Path, path: Path) -> None:
    parameters = load_policy(model).model.named_parameters()
    optimizer = torch.optim.AdamW(parameters, lr=2e-4, weight_decay=0.01, betas=(0.8, 0.95))
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.full_like(parameter, 0.01)
    optimizer.step()
    torch.save(optimizer.state_dict(), path)


def test_the_state_beside_the_model_says_how_adamw_steps(run, rollouts, tmp_path):
    model = save_checkpoint(tmp_path / "llama", "llama")
    save_state(model, model / "optimizer.pt")
    flags = (*SMALL, "--batches", 2, "--no-actual")
    outcome = run(model, rollouts, "--out", tmp_path / "beside", *flags)
    assert outcome.status == 0, outcome.err
    assert "AdamW, learning rate 0.0002, weight decay 0.01, on from the state" in outcome.out
    settings = json.loads((tmp_path / "beside" / "manifest.json").read_text())["settings"]
    assert settings["optimizer"] == "adamw" and settings["step"]["betas"] == [0.8, 0.95]
    same = run(model, rollouts, "--out", tmp_path / "beside", *flags, "--optimizer", "adamw")
    assert same.status == 0 and "already tuned" in same.out
    sgd = run(model, rollouts, "--out", tmp_path / "sgd", *flags, "--optimizer", "sgd")
    assert sgd.status == 0 and "SGD, learning rate 0.001" in sgd.out
    (model / "optimizer.pt").rename(tmp_path / "state.pt")
    given = run(model, rollouts, "--out", tmp_path / "given", *flags, "--optimizer-state", tmp_path / "state.pt")
    fresh = run(model, rollouts, "--out", tmp_path / "fresh", *flags, "--optimizer", "adamw")
    neither = run(model, rollouts, "--out", tmp_path / "neither", *flags)
    assert neither.status == 0 and "SGD, learning rate 0.001" in neither.out
    assert json.loads((tmp_path / "neither" / "manifest.json").read_text())["settings"]["optimizer"] == "sgd"
    assert given.status == 0 and "fresh: its first step is a sign step" in fresh.out
    state = torch.load(tmp_path / "state.pt")
    state["param_groups"][0] |= {"lr": 0.0, "initial_lr": 3e-4}  # a schedule that has come to its end
    torch.save(state, tmp_path / "state.pt")
    ended = run(model, rollouts, "--out", tmp_path / "ended", *flags, "--optimizer-state", tmp_path / "state.pt")
    assert ended.status == 0 and "learning rate 0.0003" in ended.out and "end of its schedule" in ended.out
    tables = [(tmp_path / name / "by_interval.csv").read_bytes() for name in ("beside", "given", "fresh")]
    assert tables[0] == tables[1] != tables[2]


# Taken up again.


def test_a_process_that_is_killed_while_it_counts_is_one_line_and_status_1(run, model, rollouts, tmp_path, monkeypatch):
    monkeypatch.setattr(cli_tune, "_count_apart", end_without_a_word)
    outcome = run(model, rollouts, *SMALL, "--jobs", 2, "--out", tmp_path / "out")
    assert_one_line(outcome, "was killed", status=1)


def end_without_a_word(*_: object) -> None:
    os._exit(9)


def test_an_interrupted_run_goes_on_to_the_files_of_an_undisturbed_one(run, model, rollouts, tmp_path, monkeypatch):
    whole, stopped, flags = tmp_path / "whole", tmp_path / "stopped", (*SMALL, "--batches", 4)
    assert run(model, rollouts, "--out", whole, *flags).status == 0
    done, right = [], cli_tune.tune_batch

    def stop_at_the_third(*args, **keywords):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(args)
        return right(*args, **keywords)

    monkeypatch.setattr(cli_tune, "tune_batch", stop_at_the_third)
    assert run(model, rollouts, "--out", stopped, *flags).status == 130
    assert set(contents(stopped)) == {
        ".partial/key.json",
        ".partial/part-000000.parquet.gz",
        ".partial/part-000001.parquet.gz",
    }
    monkeypatch.setattr(cli_tune, "tune_batch", lambda *a, **k: (done.append(a), right(*a, **k))[1])
    outcome = run(model, rollouts, "--out", stopped, *flags)
    assert outcome.status == 0 and "taking up the unfinished run" in outcome.out and len(done) == 4
    first, second = contents(whole), contents(stopped)
    manifests = [json.loads(files.pop("manifest.json")) for files in (first, second)]
    for manifest in manifests:
        del manifest["settings"]["out"], manifest["sha256"]["manifest.json"]
    assert first == second and manifests[0] == manifests[1]


# What is refused.


def test_what_cannot_be_used_is_said_in_one_line_before_anything_is_written(run, model, rollouts, tmp_path):
    out = tmp_path / "out"
    bare = write_jsonl(tmp_path / "bare.jsonl", make_rows("prompt_ids", "response_ids", "group"))
    equal = [row | {"reward": 1.0} for row in make_rows()]
    (tmp_path / "text.pt").write_text("no state")
    torch.save({"state": {}}, tmp_path / "empty.pt")
    few = (rollouts, "--min-tokens", 2)
    cases = [
        ((rollouts, "--batches", 9), "8 prompts for 9 batches"),
        ((rollouts, "--batches", 1), "--batches is 1"),
        ((bare,), "the batch has neither"),
        ((write_jsonl(tmp_path / "equal.jsonl", equal),), "equal rewards to a prompt give no advantage"),
        ((rollouts, "--dtype", "bfloat16"), "load the policy in float32"),
        ((rollouts, "--etas", 1.5), "eta is 1.5"),
        ((rollouts, "--alphas", -0.1), "alpha is -0.1"),
        ((rollouts, "--alphas", 0, "--etas", "none"), "nothing to compare"),
        ((rollouts, "--methods", "cispos"), "did you mean cispo?"),
        ((rollouts, "--methods", "cispo:eps_high=2/-1"), "eps_high is -1"),
        ((rollouts, "--methods", "random-split"), "two optimizer steps"),
        ((rollouts, "--min-tokens", 2, "--methods", "matched-norm"), "norm of two gradients"),
        ((*few, "--methods", "icepop"), "'sampler_logprob'"),
        ((rollouts, "--learning-rate", 0), "--learning-rate is 0"),
        ((rollouts, "--temperature", 0), "--temperature is 0"),
        ((rollouts, "--min-tokens", 0), "--min-tokens is 0"),
        ((*few, "--clip-ratio-low", 2), "clip_ratio_low is 2"),
        ((*few, "--max-grad-norm", 0), "max_grad_norm is 0"),
        ((*few, "--optimizer", "sgd", "--optimizer-state", tmp_path / "text.pt"), "leave out --optimizer sgd"),
        ((*few, "--optimizer-state", tmp_path / "none.pt"), "is not there"),
        ((*few, "--optimizer", "adamw", "--optimizer-state", tmp_path / "text.pt"), "cannot be read as tensors"),
        ((*few, "--optimizer", "adamw", "--optimizer-state", tmp_path / "empty.pt"), "not AdamW's"),
        ((tmp_path / "missing.jsonl",), "missing.jsonl"),
        ((), "no rollouts"),
    ]
    for args, words in cases:
        assert_one_line(run(model, *args, "--out", out), words)
    assert not out.exists()


@pytest.mark.all
def test_batches_side_by_side_give_the_same_files(run, model, rollouts, tmp_path):
    flags = (*SMALL, "--batches", 2)
    for name, jobs in (("one", 1), ("two", 2)):
        assert run(model, rollouts, "--out", tmp_path / name, *flags, "--jobs", jobs).status == 0
    for file in ("settings.csv", "by_interval.csv", "summary.txt"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
    assert_one_line(run(model, rollouts, "--out", tmp_path / "none", *flags, "--jobs", 0), "--jobs is 0")
