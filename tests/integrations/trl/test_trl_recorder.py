"""The recorder in TRL's training: what is planted in a step is named before it is taken, and training is unchanged."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
from support.cli import outcome_of
from support.refusals import refused
from support.trl_runs import make_trainer, needs_trl, save_policy, train, weights

from gradscope.integrations.row_writer import Spikes
from gradscope.integrations.trl import GradScopeCallback, SpikeRecorder

pytestmark = needs_trl
STEP = 8
QUIET = {"max_steps": STEP, "learning_rate": 1e-4}
ROUNDED = 2e-3
"""Of a norm in float32, which the trainer computes in another order: the line has four digits."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_policy(tmp_path_factory.mktemp("policy"))


def plant(trainer: Any, fault: Callable[[torch.Tensor], None], step: int = STEP) -> None:
    """Have the advantages [B, C] of this step's generation changed."""
    own, calls = trainer._generate_and_score_completions, []

    def generated(*args: Any) -> Any:
        found = own(*args)
        calls.append(None)
        if len(calls) == step:
            found["advantages"] = found["advantages"][:, None].expand(found["completion_ids"].shape).clone()
            fault(found["advantages"])
        return found

    trainer._generate_and_score_completions = generated


def train_with(checkpoint: Path, out: Path, fault: Any = None, **settings: Any) -> tuple[GradScopeCallback, str]:
    """Train with a fault in the last step, and return the callback and what was printed."""
    trainer = make_trainer(checkpoint, out, **QUIET | settings)
    if fault is not None:
        plant(trainer, fault, trainer.args.max_steps)
    callback = GradScopeCallback(trainer, every=None, spike=3)
    trainer.add_callback(callback)
    return callback, train(trainer)


def a_whole_response(advantages: torch.Tensor) -> None:
    advantages[2] = 60.0


def not_a_number(advantages: torch.Tensor) -> None:
    advantages[2, 3] = math.nan


def test_a_response_with_a_huge_advantage_is_named_before_the_step_is_taken(checkpoint, tmp_path):
    callback, printed = train_with(checkpoint, tmp_path, a_whole_response)
    [line] = [line for line in printed.splitlines() if line.startswith(f"gradscope: step {STEP}")]
    folder = tmp_path / "gradscope"
    table = pd.read_parquet(folder / "spikes" / f"step_{STEP:06d}.parquet")
    [huge] = table["response"][table["advantage"] == 60.0].unique()
    assert callback.recorder.steps == [STEP] and f"response {huge} (10 tokens)" in line
    assert table["gradient_share"].sum() == pytest.approx(1, abs=1e-4)
    assert table.loc[table["response"] == huge, "gradient_share"].sum() > 0.9
    assert (folder / "spikes" / f"step_{STEP:06d}.html").is_file()
    rows = pq.read_table(folder / "rollouts" / f"step_{STEP:06d}.parquet").to_pandas()
    assert rows["advantage"].map(max).idxmax() == huge  # responses are numbered as in the written rows
    assert rows["reward"].to_numpy() == pytest.approx(table.groupby("response")["reward"].first().to_numpy())


def test_a_weight_that_is_not_a_number_is_named_even_in_the_first_step(checkpoint, tmp_path):
    callback, printed = train_with(checkpoint, tmp_path, not_a_number, max_steps=1)
    assert callback.recorder.steps == [1] and "position 3 of response" in printed and "gradient norm nan" in printed


def test_a_training_ends_with_the_same_weights_bit_for_bit(checkpoint, tmp_path):
    ends = []
    for name in ("without", "with"):
        trainer = make_trainer(checkpoint, tmp_path / name, **QUIET | {"max_steps": STEP + 4})
        plant(trainer, a_whole_response)
        if name == "with":
            trainer.add_callback(callback := GradScopeCallback(trainer, every=5, spike=3))
        train(trainer)
        ends.append(weights(trainer.model))
    assert callback.recorder.steps == [STEP] and len(callback.rows) == 3
    assert all(torch.equal(ends[0][name], weight) for name, weight in ends[1].items())


def test_quiet_steps_raise_no_alarm_and_write_nothing(checkpoint, tmp_path):
    callback, _ = train_with(checkpoint, tmp_path, max_steps=30)
    assert callback.recorder.steps == [] and not (tmp_path / "gradscope" / "spikes").exists()


def test_a_detector_waits_for_five_norms_but_not_where_one_is_not_finite():
    assert [Spikes(3, 9).tell(norm) for norm in (1.0, 9.0)] == [False, False]
    spikes = Spikes(3, 2)
    assert [spikes.tell(norm) for norm in (1.0, 1.1, math.nan, 0.9, 1.0, 1.2, 3.1, 3.7, 9.9)] == [
        *(False, False, True, False, False, False, True, False, False)
    ]
    scaled = Spikes(3, 9, scaled=True)
    assert [scaled.tell(norm) for norm in (math.inf, 1.0, 1.0, 1.0, 1.0, 1.0, math.inf)] == [*[False] * 6, True]


def test_what_cannot_be_explained_is_refused_with_its_reason(checkpoint, tmp_path):
    trainer = make_trainer(checkpoint, tmp_path, max_grad_norm=0.0)
    with refused("max_grad_norm"):
        SpikeRecorder(trainer)
    with refused("every and spike are both None"):
        GradScopeCallback(make_trainer(checkpoint, tmp_path), every=None)


def test_the_written_step_is_explained_again_from_its_file(checkpoint, tmp_path, capsys):
    trainer = make_trainer(checkpoint, tmp_path / "run", **QUIET)
    plant(trainer, a_whole_response)
    trainer.add_callback(SpikeRecorder(trainer, weights=True))
    train(trainer)
    folder, name = tmp_path / "run" / "gradscope", f"step_{STEP:06d}"
    before, rows = folder / "spikes" / name, folder / "rollouts" / f"{name}.parquet"
    done = outcome_of(capsys, "diagnose", before, "--spike", rows, "--out", tmp_path / "again")
    assert done.status == 0 and "response" in done.out and (tmp_path / "again" / "spike.html").is_file()
    ours, again = pd.read_parquet(before.with_suffix(".parquet")), pd.read_parquet(tmp_path / "again" / "spike.parquet")
    assert again["gradient_share"].to_numpy() == pytest.approx(ours["gradient_share"].to_numpy(), abs=1e-4)
    assert again["weight"].to_numpy() == pytest.approx(ours["weight"].to_numpy(), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("more", [("--plan",), ("--rollouts", "x.jsonl")], ids=lambda more: more[0])
def test_a_step_file_with_flags_that_say_otherwise_is_refused(tmp_path, capsys, more):
    asked = ("diagnose", "embedded", "--spike", tmp_path / "step_000001.parquet", "--out", tmp_path / "out")
    done = outcome_of(capsys, *asked, *more)
    assert done.status == 2 and more[0] in done.err
    missing = outcome_of(capsys, *asked)
    assert missing.status == 2 and "step_000001.parquet" in missing.err and not (tmp_path / "out").exists()
