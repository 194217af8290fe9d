"""The benchmark of real sizes at a small one: what it makes can be measured, and what it saw is in its table."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
import torch

from analyses.benchmarks import real_size
from analyses.benchmarks.real_size import GIB, WHOLE, append_rows, stage_rows, watch
from analyses.benchmarks.real_size_policy import SHAPES, make_config
from gradscope.errors import InputError
from gradscope.gradients import ModelShape
from gradscope.policy import AdamWState, load_policy
from gradscope.rollouts import read_rollouts

MEASURE = ("measure", "MODEL", "ROLLOUTS", "--out", "OUT", "--no-figures", "--tokens-per-interval", "1")
LENGTHS = {"prompts": 2, "responses": 2, "prompt-length": 6, "response-length": 8}


def run(*arguments: object) -> None:
    real_size.main([str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("real_size") / "made"
    lengths = (word for name, value in LENGTHS.items() for word in (f"--{name}", value))
    run("make", "1m", folder, "--dtype", "bfloat16", "--state", *lengths)
    return folder


def test_the_configurations_have_the_parameters_that_their_names_say():
    # Qwen2.5's and Llama-3's own counts.
    counts = {"0.5b": 494_032_768, "1.5b": 1_543_714_304, "7b": 7_615_616_512, "llama-8b": 8_030_261_248}
    found = {size: ModelShape.from_config(make_config(size)).parameters for size in SHAPES}
    assert {size: found[size] for size in counts} == counts
    assert 0.8e6 < found["1m"] < 2e6 and 28e6 < found["30m"] < 32e6


def test_what_is_made_is_a_policy_its_own_rollouts_and_a_state_that_fits(made):
    policy = load_policy(made / "policy", dtype="upcast")
    assert len(list((made / "policy").glob("*.safetensors"))) > 3  # shards
    batch = read_rollouts(made / "rollouts.jsonl", policy)
    assert (len(batch), batch.num_tokens, len(batch.group_ids.unique())) == (4, 32, 2)
    assert batch.rewards.tolist().count(1.0) == 2  # half of each prompt's
    counts = json.loads((made / "made.json").read_text())["tokens_by_interval"]
    assert sum(counts) == 32 and all(counts)
    state = torch.load(made / "optimizer.pt", weights_only=True)
    moments = AdamWState.from_state_dict(policy.model, state)
    assert {name: m.shape for name, m in moments.exp_avg_sq.items()} == {
        name: p.shape for name, p in policy.model.named_parameters()
    }
    # Storages of their own, as in a file that a trainer wrote.
    assert all(m.untyped_storage().nbytes() == m.nbytes for m in moments.exp_avg_sq.values())


def test_a_run_and_a_plan_leave_their_stages_in_the_table(made, tmp_path):
    out = tmp_path / "table.csv"
    run("run", made, "--out", out, "--limit", 4, "--", *MEASURE)
    run("plan", "0.5b", "--out", out, "--tokens-per-interval", 2)
    table = pd.read_csv(out)
    assert list(table["kind"].unique()) == ["measured", "plan"]
    own, plan = (table[table["kind"] == kind].set_index("stage") for kind in ("measured", "plan"))
    assert {"loading", "structure", "statistics", "self-check", "tokens", WHOLE} <= set(own.index)
    for column in ("seconds", "cpu_seconds", "forward_passes"):
        assert own[column].drop(WHOLE).sum() == pytest.approx(own[column][WHOLE], abs=0.1)
    assert own.loc[WHOLE, "forward_passes"] > 10 and own.loc["statistics", "forward_passes"] == 4
    assert 0.1 < own.loc[WHOLE, "anonymous_gib"] < own.loc[WHOLE, "resident_gib"] < 4
    assert own.loc[WHOLE, "ended"] == "status 0"
    assert (made / "out" / "tokens.parquet").is_file()
    measuring = plan["seconds"].filter(regex="^(?!summed|whole)")
    assert measuring.sum() == pytest.approx(plan["seconds"][WHOLE], abs=0.1)
    assert plan.loc[WHOLE, "planned_gib"] > 0.9  # 494 M parameters in bfloat16


def test_what_takes_more_than_the_limit_is_killed_and_what_it_started_too(tmp_path):
    hungry = "import time; held = bytearray(300 << 20); held[::4096] = b'x' * len(held[::4096]); time.sleep(60)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {hungry!r}])"
    start = time.monotonic()
    seen = watch([sys.executable, "-c", parent], tmp_path / "log", limit=200 << 20)
    assert time.monotonic() - start < 30
    assert seen.killed and seen.status < 0 and seen.ending == "the limit of its memory"
    assert max(anonymous for _, anonymous, _ in seen.samples) > 200 << 20


def test_a_stages_memory_and_time_are_its_own(tmp_path):
    events = tmp_path / "events.jsonl"
    # Within "outer" from second 1 to 4, "inner" from 2 to 3.
    stages = [(0, "rest", 0), (1, "outer", 0), (2, "inner", 1), (3, "outer", 3), (4, "rest", 3)]
    marks = [{"stage": s, "time": t, "cpu": t / 2, "passes": p, "device_bytes": t * GIB} for t, s, p in stages]
    events.write_text("".join(json.dumps(mark) + "\n" for mark in marks))
    seen = real_size.Watched(0, False, 0.0, 5.0, 3.0, [(t + 0.5, t * GIB, 2 * t * GIB) for t in range(5)])
    rows = {row["stage"]: row for row in stage_rows(seen, events)}
    assert {name: row["seconds"] for name, row in rows.items()} == {"rest": 2, "outer": 2, "inner": 1, WHOLE: 5}
    assert {name: row["cpu_seconds"] for name, row in rows.items()} == {"rest": 1.5, "outer": 1, "inner": 0.5, WHOLE: 3}
    assert {n: row["anonymous_gib"] for n, row in rows.items()} == {"rest": 4, "outer": 3, "inner": 2, WHOLE: 4}
    assert {n: row["device_gib"] for n, row in rows.items()} == {"rest": 1, "outer": 4, "inner": 3, WHOLE: 4}
    assert {n: row["forward_passes"] for n, row in rows.items()} == {"rest": 0, "outer": 1, "inner": 2, WHOLE: 3}


def test_a_run_that_is_made_again_replaces_its_rows_and_no_others(tmp_path):
    key = {"size": "1m", "weights": "float32", "kind": "measured", "machine": "here"}
    for name, seconds in (("a", 1.0), ("b", 2.0), ("a", 3.0)):
        append_rows(tmp_path / "t.csv", [key | {"run": name, "stage": WHOLE, "seconds": seconds}])
    table = pd.read_csv(tmp_path / "t.csv")
    assert dict(zip(table["run"], table["seconds"], strict=True)) == {"a": 3.0, "b": 2.0}


def test_bad_input_is_refused(tmp_path):
    with pytest.raises(InputError, match="nothing stands after --"):
        run("run", tmp_path)
    with pytest.raises(InputError, match="holds nothing that `make` wrote"):
        run("run", tmp_path, "--", *MEASURE)
    with pytest.raises(InputError, match="prompts is 0"):
        run("plan", "1m", "--prompts", 0)
