"""The benchmark of real sizes at a small one: what it makes can be measured, and what it saw is in its table."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM

from analyses.benchmarks import real_size
from analyses.benchmarks.real_size import WHOLE
from analyses.benchmarks.real_size_policy import SHAPES, make_config
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


def parameters_of(config):
    with torch.device("meta"):
        return ModelShape.of(AutoModelForCausalLM.from_config(config)).parameters


def test_the_configurations_have_the_parameters_that_their_names_say():
    # Qwen2.5's and Llama-3's own counts.
    counts = {"0.5b": 494_032_768, "1.5b": 1_543_714_304, "7b": 7_615_616_512, "llama-8b": 8_030_261_248}
    found = {size: parameters_of(make_config(size)) for size in SHAPES}
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


@pytest.mark.all
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
