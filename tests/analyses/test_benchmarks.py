"""The benchmarks compare like with like, and count all time once."""

import json
import re
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

import gradscope
from analyses.benchmarks import token_gradients
from analyses.benchmarks.peers import PACKAGES, WAYS, Way
from analyses.benchmarks.real_size_stages import IMPORTS, REST, STAGES
from analyses.benchmarks.trainer import compare_lopti, time_parts
from analyses.benchmarks.trainer_loops import Size, finishing, random_workload
from gradscope.rollouts import write_rollouts

TINY = Size("tiny", vocab=64, hidden=16, heads=2, mlp=24, layers=2, questions=2, group=4, prompt=5, response=10)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A policy with weights so large that its attention is not uniform."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 80, "intermediate_size": 24}
    model = Qwen2ForCausalLM(Qwen2Config(**shape, **heads, tie_word_embeddings=False))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder := tmp_path_factory.mktemp("policy"))
    return folder


@pytest.mark.parametrize("linear", [True, False])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.all) if name in PACKAGES else name for name in WAYS]
)
def test_every_way_of_the_benchmark_gives_the_norms_of_autograd(name, linear, checkpoint):
    if name in PACKAGES:
        pytest.importorskip(name.replace("-", "_"))
    ids, targets = torch.randint(0, 80, (2, 20), generator=torch.Generator().manual_seed(1)), [5, 7, 9, 15, 19]
    way = Way(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # The packages and torch.func warn about their own internals.
        if name == "bergson" and not linear:
            with pytest.raises(NotImplementedError, match="Embedding and Qwen2RMSNorm"):
                way.prepare(checkpoint, linear, 2)
            return
        way.prepare(checkpoint, linear, 2)
        cpu, wall, found = way.time(ids.tolist(), targets)
    assert min(cpu, wall) > 0 and way.peak(ids.tolist(), targets) > 10_000
    model = Qwen2ForCausalLM.from_pretrained(checkpoint).double()
    logprobs = model(ids).logits.log_softmax(-1)
    owners = [m for m in model.modules() if isinstance(m, torch.nn.Linear) or not linear]
    parameters = [p for module in owners for p in module.parameters(recurse=False)]
    wanted = []
    for row in (0, 1):
        for token in targets:
            gradient = torch.autograd.grad(logprobs[row, token - 1, ids[row, token]], parameters, retain_graph=True)
            wanted.append(torch.cat([g.flatten() for g in gradient]).norm().item())
    np.testing.assert_allclose(found, wanted, rtol=1e-5)  # float32


@pytest.mark.all
def test_the_ways_take_turns_in_processes_of_their_own_and_one_that_cannot_keeps_its_row(tmp_path, monkeypatch):
    monkeypatch.setitem(token_gradients.PLANS, "S", token_gradients.Plan(2, 1, 2, 2))
    monkeypatch.setattr(token_gradients, "HOME", Path(sys.prefix))  # where only gradscope's own packages are
    out = tmp_path / "speed.png"
    ways = ("loop", "bergson", "gradscope")
    token_gradients.main(token_gradients.Options(("S",), (16,), ways=ways, out=out))
    table = pd.read_csv(tmp_path / "data/speed.csv").set_index("way")
    assert list(table.index) == 2 * list(ways) and out.exists()
    assert "bergson" in table["reason"]["bergson"].iloc[0] and np.isnan(table["ms_per_token"]["bergson"]).all()
    assert (table["max_relative_error"].drop("bergson") < 1e-5).all()  # float32
    own = table.loc["gradscope"]
    np.testing.assert_allclose(own["ratio"], 1)
    # With one other way, the best other is that one.
    for best, ratio in {"best": "ratio", "best_min": "ratio_min", "best_max": "ratio_max"}.items():
        np.testing.assert_allclose(own[best], table[ratio]["loop"])


def test_the_parts_of_a_step_of_the_trainer_add_up_to_it_with_and_without_lopti(tmp_path):
    workload = replace(random_workload(TINY, tmp_path), micro_batch_size=8)
    with finishing():
        table = time_parts(workload, tmp_path / "runs", rounds=2)
    assert list(table["method"]) == ["plain", "Lopti"]
    # Medians of two steps are their means, so they add up.
    parts = table.filter(regex="^cpu_(sampling|old|reference|training|rest)$")
    np.testing.assert_allclose(parts.sum(axis=1), table["cpu_s"], rtol=1e-9)
    assert list(table["tokens"]) == [80, 80]


def test_lopti_takes_the_wanted_share_of_the_same_tokens_first(tmp_path):
    workload = replace(random_workload(TINY, tmp_path), micro_batch_size=8)
    table = compare_lopti(workload, [0.25, 0.5], rounds=2)
    assert list(table["method"]) == ["plain", "Lopti", "Lopti"] and (table["tokens"] == 80).all()
    # At most the one token at the quantile is off.
    np.testing.assert_allclose(table["low_share"], [0, 0.25, 0.5], atol=1.01 / 80)
    assert (table["cpu_ratio"] > 0).all() and table["cpu_ratio"][0] == 1


@pytest.mark.all
def test_every_stage_of_the_clock_is_met(tmp_path):
    batch = gradscope.sample("embedded", task="knights-knaves-compact", questions=2, n=2, max_new_tokens=20, seed=0)
    write_rollouts(tmp_path / "rollouts.jsonl", batch)
    met = set()
    for command in ("measure embedded rollouts.jsonl --out a", "diagnose embedded --rollouts rollouts.jsonl --out b"):
        start = [sys.executable, "-m", "analyses.benchmarks.real_size_stages", "events"]
        subprocess.run([*start, *command.split()], cwd=tmp_path, check=True, capture_output=True)
        met |= {json.loads(line)["stage"] for line in (tmp_path / "events").read_text().splitlines()}
    assert met == {IMPORTS, REST, *STAGES.values()}


def test_the_documented_speeds_are_those_of_their_csv():
    root, keys = Path(__file__).parents[2], ["size", "length", "parameters"]
    measured = pd.read_csv(root / "figures/cost/data/benchmark_token_gradients.csv")
    measured = measured.set_index([*keys, "way"]).sort_index()
    lines = (root / "docs" / "cost.md").read_text(encoding="utf-8").splitlines()
    starts = ("| S, ", "| M, ", "| SmolLM2, ")
    rows = [line.strip("| ").replace("*", "").split(" | ") for line in lines if line.startswith(starts)]
    assert len(rows) == len(measured.groupby(keys))
    for name, *cells, ratio, share in rows:
        size, length, parameters = name.split(", ")
        own = measured.loc[size, int(length), parameters]
        ours = own.loc["gradscope"]
        bounds = ["best", "best_min", "best_max"] if ours["rounds"] > 1 else ["best"]
        wanted = [*own["ms_per_token"].reindex(list(WAYS)), *ours[[*bounds, "fraction_of_floor"]]]
        cells += [*re.findall(r"[\d.]+", ratio), share]
        found = [float(cell.replace("–", "nan")) for cell in cells]
        np.testing.assert_allclose(found, wanted, rtol=0.006, atol=0.005)  # three digits, two after the point
